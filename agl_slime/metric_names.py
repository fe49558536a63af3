"""Names of the metrics that modules and reporters share; a run may add others. docs/report.md explains each."""

REWARD_MEAN = "rollout/reward_mean"  # mean over the rollouts of the iteration, one reward per rollout
REWARD_MEAN_UNIFORM = "rollout/reward_mean_uniform"  # of all tasks alike, where a sampler draws some more often
NO_GRADIENT = (
    "rollout/no_gradient"  # share of sampled tokens in groups without differing rewards, dropped ones included
)
REWARD_STD = "rollout/reward_std"
REWARD_MIN = "rollout/reward_min"
REWARD_MAX = "rollout/reward_max"
COUNT = "rollout/count"  # rollouts that ended in this iteration, failed ones included
FAILED = "rollout/failed"
RESPONSE_TOKENS = "rollout/response_tokens_mean"  # sampled tokens per rollout
TRAINED_TOKENS_MEAN = "rollout/response_tokens_mean_trained"  # the same over rollouts that go to the trainer
DROPPED_TOKENS_MEAN = "rollout/response_tokens_mean_dropped"  # the same over failed rollouts and dropped groups
TOKENS_UNDER_MASK = "rollout/tokens_under_mask"  # tokens with loss mask 1 in the samples that leave the data source
FORKS = "trace/forks"  # samples beyond the first of their rollout
RETOKENIZED = "trace/retokenized"  # samples whose text was re-tokenized: their ids are not the engine's
VAL_START_REWARD_MEAN = "val/start_reward_mean"  # validation before the first training step, in the first iteration
VAL_REWARD_MEAN = "val/reward_mean"  # validation with the weights after the iteration; only in iterations that have one
VAL_INTERVAL = ("val/reward_low", "val/reward_high")  # 95 % of that mean, over its tasks
# minus the run's first validation, task by task, with its 95 % interval
VAL_DIFFERENCE = ("val/difference", "val/difference_low", "val/difference_high")
VAL_START_INTERVAL = ("val/start_reward_low", "val/start_reward_high")
VAL_COUNT, VAL_FAILED = "val/count", "val/failed"  # rollouts of the validation; those without a reward, not in its mean
VAL_START_COUNT, VAL_START_FAILED = "val/start_count", "val/start_failed"
TOOL_CALLS = "tools/calls"  # calls of tools in rollouts that were offered some
TOOL_ERRORS = "tools/errors"  # among them: the tool raised or took too long, or the arguments did not fit
LOSS = "train/loss"
LOGPROB_DIFF_MAX = (
    "train/logprob_diff_max"  # max |trainer - engine| log-prob, in nats, before the batch's first step (see train)
)
LOGPROB_DIFF_MEAN = "train/logprob_diff_mean"
FIRST_RATIO_DEV_MAX = "train/first_ratio_dev_max"  # max |ratio - 1| in the first minibatch
TOKENS_TRAINED = "train/tokens_trained"  # tokens with loss mask 1, counted by the trainer, once for all epochs
TOKENS_PER_S = "perf/tokens_per_s"  # sampled tokens per second of collecting
ITERATION_S = "perf/iteration_s"
STALENESS_MEAN = "rollout/staleness_mean"  # versions that sampled tokens are behind the weights that train on them
STALENESS_MAX = "rollout/staleness_max"
TRAIN_S, SYNC_S = "perf/train_s", "perf/sync_s"
ROLL_S = (
    "perf/roll_s"  # asynchronous: seconds of the iteration in which training rollouts were in flight, syncs left out
)
TRAINER_WAITED = "perf/trainer_waited"  # asynchronous: share of the iteration in which training waited for rollouts
ENGINE_WAITED = "perf/engine_waited"  # share of it with no rollout in flight, because of the staleness limit
CPU_BUSY = "perf/cpu_busy"  # share of this machine's CPU that was busy in an asynchronous iteration, with all programs
VAL_EARLIER_REWARD_MEAN = "val/earlier_reward_mean"  # of a validation that was still running when the last one began
VAL_LAG = "val/lag"  # asynchronous: weight versions pushed while the validation ran; 0 on an engine of its own
WEIGHTS_VERSION = "weights/version"
AUTOPSY = "autopsy"  # a few turns scored again: /sampler and /decode, mean differences in nats per token
AUTOPSY_CAUSE = "autopsy/cause"  # below it, by name: the nats per token that the cause explains

REQUIRED_KEYS = (REWARD_MEAN, COUNT, FAILED, LOSS, LOGPROB_DIFF_MAX, FIRST_RATIO_DEV_MAX, TOKENS_PER_S, ITERATION_S)
REQUIRED_KEYS += (WEIGHTS_VERSION,)
