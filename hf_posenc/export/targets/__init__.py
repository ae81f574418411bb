"""Stock architectures that compute what a patched model computes, one file each. A new file here is found by itself."""
