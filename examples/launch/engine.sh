#!/bin/bash
# engine.sh
# Samples and trains on one machine, or on two that see the same files: names of hosts, "" for this one.
engine_host=${ENGINE_HOST-}
model=/path/to/model               # that the stage starts from
rlhf=/path/to/venv/bin/rlhf
vllm=/path/to/engine/bin/vllm      # an environment of its own: it needs torch
port=8000
settings="VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True CUDA_VISIBLE_DEVICES=0,1,2,3"
serve="$vllm serve $model --port $port --tensor-parallel-size 4 --logprobs-mode processed_logprobs
    --enable-lora --max-loras 3 --max-lora-rank 16"
if [ "$engine_host" ]; then        # the engine ends with its input, and where the connection is lost
    exec 3< <(exec sleep infinity)
    engine=$!
    ssh "$engine_host" "cd $PWD || exit; env $settings $(echo $serve) & engine=\$!; cat; kill \$engine" <&3 &
else
    env $settings $serve &
    engine=$!
fi
# The run waits `patience` seconds for its engine.
CUDA_VISIBLE_DEVICES=4,5,6,7 "$rlhf" run pipeline.toml \
    --set "policy.sampler.urls=[\"http://${engine_host:-127.0.0.1}:$port\"]" &
run=$!
trap 'stopped=1; kill $run' TERM INT HUP
while stopped=; wait $run; code=$?; [ $stopped ]; do :; done    # a signal ends `wait`, not the run
kill $engine
exit $code
