"""Model families, one file per way of attaching positions. A new file here is found by itself: see CONTRIBUTING.md."""
