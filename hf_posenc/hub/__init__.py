"""Where patched models come from and go to: the Auto classes, saved folders, the Hub."""
