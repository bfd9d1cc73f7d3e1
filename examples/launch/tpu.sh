#!/bin/bash
# tpu.sh
NAME=my-slice ZONE=us-central2-b WORKERS=2
rlhf=/path/to/venv/bin/rlhf        # on the hosts; a shell that ssh starts has no environment activated
tpu="gcloud compute tpus tpu-vm"
first=$($tpu describe "$NAME" --zone="$ZONE" --format="value(networkEndpoints[0].ipAddress)") || exit
exec 3< <(exec sleep infinity)     # the input of every ssh: it ends when this script is stopped
input=$!
trap 'stopped=1; kill $input' TERM INT HUP
pids=()
for i in $(seq 0 $((WORKERS - 1))); do
    job="JAX_COORDINATOR_ADDRESS=$first:8476 JAX_NUM_PROCESSES=$WORKERS JAX_PROCESS_ID=$i"
    # On the host: where the input ends, or the connection is lost, the process gets SIGTERM and saves its state.
    $tpu ssh "$NAME" --zone="$ZONE" --worker="$i" --command="cd project || exit; exec 3<&0
        $job $rlhf run pipeline.toml & run=\$!
        { cat <&3; kill \$run; } >/dev/null 2>&1 & wait \$run" <&3 &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    while stopped=; wait "$pid"; ended=$?; [ $stopped ]; do :; done    # a signal ends `wait`, not the process
    case $ended,$code in           # the first of: 2, a failure, 75, 0
        0,*|*,2) ;;
        2,*) code=2 ;;
        75,0) code=75 ;;
        75,*) ;;
        *) code=1 ;;
    esac
done
kill $input 2>/dev/null
exit $code
