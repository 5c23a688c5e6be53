"""The routes that OpenAI's clients call: fields are read, the engine is asked, its words are shown."""
