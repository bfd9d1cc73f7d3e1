"""OpenAI's routes without a model: their wire format, keys, limits and times."""
