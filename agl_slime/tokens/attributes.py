"""Names of the spans and attributes of model calls.

``gen_ai.*`` are OpenTelemetry's names (its generative-AI semantic conventions), so that any OpenTelemetry viewer shows
a call as a model call; ``agl_slime.*`` are this package's.
"""

from __future__ import annotations

from typing import Final

GENERATE_SPAN: Final = "agl_slime.generate"
"""Name of the span of one model call."""

FORMAT_VERSION: Final = 1
"""The value of ``agl_slime.format``; readers refuse other versions."""

GATEWAY_SPAN: Final = "agl_slime.gateway"
"""Name of the span with a gateway's counts of a rollout."""

# -- OpenTelemetry's --------------------------------------------------------------------------------------------------
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
# the older, flattened form: gen_ai.prompt.0.role, gen_ai.completion.0.content …
LEGACY_PROMPT: Final = "gen_ai.prompt"
LEGACY_COMPLETION: Final = "gen_ai.completion"

# -- this package's ----------------------------------------------------------------------------------------------------
FORMAT: Final = "agl_slime.format"
STREAM: Final = "agl_slime.turn.stream"  # the encoder that wrote the span: turn indices count within it
TURN_INDEX: Final = "agl_slime.turn.index"
PROMPT_BASE: Final = "agl_slime.prompt.base_turn"  # absent if the prompt extends no earlier turn
PROMPT_KEPT: Final = "agl_slime.prompt.kept_tokens"
PROMPT_FORK: Final = "agl_slime.prompt.fork"  # why not all tokens of the base turn are kept; absent if they are
PROMPT_IDS: Final = "agl_slime.prompt.ids"  # packed int32: the prompt after its kept tokens
RESPONSE_IDS: Final = "agl_slime.response.ids"  # packed int32
LOG_PROBS: Final = "agl_slime.response.log_probs"  # packed float32; absent if the engine returned none
REPLAY_FILE: Final = "agl_slime.response.replay_file"  # JSON, in place of the next four: see FiledReplay
EXPERTS: Final = "agl_slime.response.routed_experts"  # base64 of uint8 or uint16, absent unless requested
EXPERTS_SHAPE: Final = "agl_slime.response.routed_experts_shape"  # JSON: [start, rows, layers, experts, bytes, CRC-32]
NUCLEUS_IDS: Final = "agl_slime.response.nucleus_ids"  # packed int32: candidates that top_p and top_k left
NUCLEUS_OFFSETS: Final = "agl_slime.response.nucleus_offsets"  # packed int32: start of each token's ids, and the end
SPECULATED: Final = "agl_slime.response.speculated"  # JSON: accepted and drafted tokens, verifications
IMAGES: Final = "agl_slime.prompt.images"  # JSON: number of images kept of the base turn, hashes of the others
IMAGE_DATA: Final = "agl_slime.prompt.image_data"  # JSON: image files that this encoder has not written yet
CHECKSUM: Final = "agl_slime.checksum"  # CRC-32 of the whole prompt, the response and the log-probs
WEIGHT_VERSIONS: Final = "agl_slime.weight_versions"  # JSON: [[version, start, end], …] over the response
MESSAGES_KEPT: Final = "agl_slime.messages.kept"  # number of messages kept of the base turn
MESSAGES_NEW: Final = "agl_slime.messages.new"  # JSON list of the messages after them
ROLE: Final = "agl_slime.role"  # by a gateway: resource name of the called model
ROLES: Final = "agl_slime.roles"  # JSON list, by a gateway: all its resource names, if several
UNTRAINED: Final = "agl_slime.turn.untrained"  # why the response is context only; absent if trained
TOKEN_SOURCE: Final = "agl_slime.token_source"
LATENCY_S: Final = "agl_slime.latency_s"
RESUMED: Final = "agl_slime.resumed"
STOP_REASON: Final = "agl_slime.stop_reason"  # on any span: why the rollout as a whole stopped; the last one counts
TOOLS: Final = "agl_slime.tools"  # JSON, on the last span: offered tools, calls by tool, malformed calls, errors
REWARDS_MISSING: Final = "agl_slime.rewards_missing"  # JSON, on a reward span: names in order, why one has no number
OPEN_BOUNDARIES: Final = "agl_slime.prompt.open_boundaries"  # on the last span: see ChatContext
FAILURE_REASON: Final = "agl_slime.failure.reason"  # on its exception span: why an attempt failed, one stable word
UNTRAINED_TURNS: Final = "agl_slime.untrained_turns"  # JSON list, on the last span: turns that are context only

GATEWAY: Final = "agl_slime.gateway.seen"  # JSON, on the last span: the gateway's counts of requests

# -- Agent Lightning's, as its adapters read them (agentlightning/adapter/triplet.py) ---------------------------------
LIST_PROMPT_IDS: Final = "prompt_token_ids"
LIST_RESPONSE_IDS: Final = "response_token_ids"
LIST_LOG_PROBS: Final = "logprobs.content"  # JSON list of OpenAI's log-prob objects
