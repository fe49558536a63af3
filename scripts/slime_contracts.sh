#!/usr/bin/env bash
# Points slime's own plug-in contract tests at our hooks and prints a table, one row per hook:
#   scripts/slime_contracts.sh SLIME_DIR [PYTHON]
# SLIME_DIR is a checkout of slime; PYTHON has slime's and our dependencies (scripts/slime_cpu.sh makes such an environment). Exit code 1 if a row fails.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
slime_dir=$(cd "${1:?usage: scripts/slime_contracts.sh SLIME_DIR [PYTHON]}" && pwd)
python=${2:-python}
contracts=tests/plugin_contracts
[ -d "$slime_dir/$contracts" ] || { echo "there are no contract tests in $slime_dir/$contracts; give a checkout of slime v0.2.3 or later" >&2; exit 2; }

hooks=agl_slime.slime_hooks
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# contracts KEY=VALUE...: slime's whole contract suite with SLIME_CONTRACT_KEY set; the results go to $log
contracts() {
  local settings=() setting
  for setting in "$@"; do settings+=("SLIME_CONTRACT_$setting"); done
  (cd "$slime_dir" && env "${settings[@]}" PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" AGL_SLIME_AGENT=tests.programs.agents.contract_agent:ContractAgent \
    AGL_SLIME_GET_TIMEOUT_S=60 "$python" -m pytest "$contracts" -rA -q --no-header -p no:cacheprovider >"$log" 2>&1)
}

failed=0
# row HOOK OURS TEST: what became of the contract test whose id ends in TEST
row() {
  local result=FAIL
  grep -qF "PASSED $contracts/$3" "$log" && result=pass || failed=1
  printf '| %-37s | %-49s | %s |\n' "$1" "$2" "$result"
  [ $result = pass ] || grep -E "^(FAILED|ERROR).*(${3%%\[*}|${3%%::*})" "$log" | head -3 | sed 's/^/    /'
}

echo "slime $(git -C "$slime_dir" describe --tags --always 2>/dev/null || echo "at $slime_dir")"
contracts ROLLOUT_FUNCTION_PATH=$hooks.generate_rollout EVAL_FUNCTION_PATH=$hooks.generate_rollout CUSTOM_GENERATE_FUNCTION_PATH=$hooks.generate \
  DATA_SOURCE_PATH=agl_slime.AGLDataSource BUFFER_FILTER_PATH=$hooks.take_oldest DYNAMIC_SAMPLING_FILTER_PATH=$hooks.keep_nonzero_variance \
  ROLLOUT_SAMPLE_FILTER_PATH=$hooks.mask_unfit ROLLOUT_ALL_SAMPLES_PROCESS_PATH=$hooks.count_groups CUSTOM_RM_PATH=$hooks.reward_of_agent \
  CUSTOM_REWARD_POST_PROCESS_PATH=$hooks.normalize_rewards CUSTOM_ROLLOUT_LOG_FUNCTION_PATH=$hooks.log_rollout \
  CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH=$hooks.log_eval_rollout
printf '| %-37s | %-49s | %s |\n' "slime's flag" "pointed at" ""
printf '|%s|%s|------|\n' "$(printf -- '-%.0s' {1..39})" "$(printf -- '-%.0s' {1..51})"
load=test_plugin_path_loading_contracts.py::test_path_loading_path_aligns_with_expected_format
hook=test_plugin_runtime_hook_contracts.py::test_runtime_hook_path_aligns_with_expected_format
row rollout-function-path $hooks.generate_rollout test_plugin_rollout_contracts.py::test_rollout_function_path_contract_supports_user_override
row eval-function-path $hooks.generate_rollout "$load[eval_function]"
row custom-generate-function-path $hooks.generate test_plugin_generate_contracts.py::test_custom_generate_function_path_supports_user_override
row data-source-path agl_slime.AGLDataSource "$load[data_source]"
row buffer-filter-path $hooks.take_oldest "$load[buffer_filter]"
row dynamic-sampling-filter-path $hooks.keep_nonzero_variance "$load[dynamic_filter]"
row rollout-sample-filter-path $hooks.mask_unfit "$load[rollout_sample_filter]"
row rollout-all-samples-process-path $hooks.count_groups "$load[rollout_all_samples_process]"
row custom-rm-path $hooks.reward_of_agent test_plugin_path_loading_contracts.py::test_custom_rm_path_aligns_with_expected_format
row custom-reward-post-process-path $hooks.normalize_rewards "$hook[custom_reward_post_process]"
row custom-rollout-log-function-path $hooks.log_rollout "$hook[custom_rollout_log]"
row custom-eval-rollout-log-function-path $hooks.log_eval_rollout "$hook[custom_eval_rollout_log]"
summary=$(tail -1 "$log")
others=$(grep -E '^(FAILED|ERROR)' "$log")
contracts CUSTOM_RM_PATH=$hooks.rewards_of_agents GROUP_RM=1
row "custom-rm-path, with group-rm" $hooks.rewards_of_agents test_plugin_path_loading_contracts.py::test_custom_rm_path_aligns_with_expected_format
echo "the whole suite: ${summary//=/}"
if [ -n "$others" ]; then echo "$others" | cut -c -160; fi
exit $failed
