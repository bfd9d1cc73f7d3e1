#!/bin/bash
# hosts.sh
hosts=(node1 node2)
rlhf=/path/to/venv/bin/rlhf        # on the hosts; a shell that ssh starts has no environment activated
exec 3< <(exec sleep infinity)     # the input of every ssh: it ends when this script is stopped
input=$!
trap 'stopped=1; kill $input' TERM INT HUP
pids=()
for i in "${!hosts[@]}"; do
    job="JAX_COORDINATOR_ADDRESS=${hosts[0]}:8476 JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i"
    # On the host: where the input ends, or the connection is lost, the process gets SIGTERM and saves its state.
    ssh "${hosts[$i]}" "cd project || exit; exec 3<&0; $job $rlhf run pipeline.toml & run=\$!
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
