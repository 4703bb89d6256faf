#!/usr/bin/env bash
# Try the image where there is a TPU: check, start, ask with tools, stop, start again warm, apply an adapter.
#
#   docker/try_on_tpu.sh DIR MODEL [--adapter NAME] [options of vllm serve]
#
# DIR holds the folders MODEL and NAME. ENGINE is docker or podman, RUN_OPTIONS are those of `docker run`. Prints what it
# does, seconds and answers, and ends with 1 at the first thing that is not right; the server's log is then in try.log.
set -euo pipefail

models=$(realpath "$1") model=$2
shift 2
adapter=
if [ "${1-}" = --adapter ]; then
    adapter=$2
    shift 2
fi
engine=${ENGINE:-docker} image=${IMAGE:-portlab-vllm-tpu} name=portlab-try
read -ra options <<<"${RUN_OPTIONS:---init --privileged --net host --shm-size 16g}"
mounts=(--volume "$models:/models:ro" --volume portlab-try-cache:/cache)

fail() {
    echo "FAILED  $*"
    "$engine" logs $name >try.log 2>&1 || true
    exit 1
}
is_running() { [ "$("$engine" inspect --format '{{.State.Running}}' $name)" = true ]; }

start() { # options of vllm serve; prints seconds until the server is healthy
    local began=$SECONDS
    "$engine" run --detach --name $name "${options[@]}" "${mounts[@]}" "$image" "/models/$model" "$@" >/dev/null
    until curl --silent --fail --max-time 2 http://127.0.0.1:8000/health; do
        is_running || fail "the server ended before it was healthy"
        sleep 1
    done
    echo "ok      healthy after $((SECONDS - began)) s"
}

stop() { # the server ends by itself, with 0, well within docker's patience
    local began=$SECONDS
    "$engine" stop --time 120 $name >/dev/null
    local code
    code=$("$engine" inspect --format '{{.State.ExitCode}}' $name)
    [ "$code" = 0 ] || fail "exit code $code after stop"
    "$engine" rm $name >/dev/null
    echo "ok      stopped after $((SECONDS - began)) s, exit code 0"
}

ask() { # a question that a tool answers
    curl --silent --show-error --fail http://127.0.0.1:8000/v1/chat/completions --header 'Content-Type: application/json' --data '{
      "model": "/models/'"$model"'", "temperature": 0, "max_tokens": 64,
      "messages": [{"role": "user", "content": "How many steps did I take on 2026-01-02?"}],
      "tools": [{"type": "function", "function": {"name": "get_steps", "description": "Steps of a day.", "parameters": {
        "type": "object", "properties": {"day": {"type": "string", "description": "As 2026-12-31."}}, "required": ["day"]}}}]
    }' | python3 -c '
import json, sys
choice = json.load(sys.stdin)["choices"][0]
print("answer ", choice["finish_reason"], json.dumps(choice["message"].get("tool_calls") or choice["message"]["content"]))'
}

"$engine" rm --force $name >/dev/null 2>&1 || true
"$engine" volume rm portlab-try-cache >/dev/null 2>&1 || true # the first start is a cold one
"$engine" run --rm --user portlab "${mounts[@]}" "$image" "/models/$model" "$@" --preflight-only
start "$@"
ask
stop
start "$@"
ask
stop
"$engine" run --rm "${mounts[@]}" --entrypoint du "$image" -sh /cache/xla
if [ -n "$adapter" ]; then
    start "$@" --lora-modules "try=/models/$adapter" --check-adapter
    until "$engine" logs $name 2>&1 | grep '^adapter try: '; do
        is_running || fail "the adapter changes nothing, or could not be asked"
        sleep 1
    done
    stop
fi
