"""The model endpoint for agents that nobody rewrote: an address per attempt, spoken to in the protocols of OpenAI and
Anthropic, with the tokens of each answer kept as the engine sampled them."""
