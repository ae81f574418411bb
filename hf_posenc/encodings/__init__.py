"""Position encodings, one file each. A new file here is found by itself: see CONTRIBUTING.md."""
