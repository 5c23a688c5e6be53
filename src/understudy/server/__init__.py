"""OpenAI's interface over HTTP. It is given a Backend and knows no engine."""
