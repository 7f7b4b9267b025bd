"""A small random model of the DeepSeek-V3/Kimi family, its drafters and its tokenizer."""
