"""hf_posenc: replace the position encoding of a pretrained Hugging Face model, and measure what that does."""
