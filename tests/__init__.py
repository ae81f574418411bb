"""Tests mirror the package; contracts/ holds the matrices, oracles/ the comparisons with real models."""
