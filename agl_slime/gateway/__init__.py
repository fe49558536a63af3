"""The model endpoint for unmodified agents: an address per attempt, the protocols of OpenAI and Anthropic, and a record
of the tokens of each answer as the engine sampled them."""
