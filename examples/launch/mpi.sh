#!/bin/bash
# mpi.sh
hosts=(node1 node2)
slots=8                            # processes per host: one per GPU
rlhf=/path/to/venv/bin/rlhf
# mpirun kills for SIGTERM, and passes SIGUSR1 on, which stops a run as well. Open MPI 4 reads the first variable and 5
# the second: the signal goes to rlhf alone, not to the processes that it started.
export OMPI_MCA_odls_base_signal_direct_children_only=1 PRTE_MCA_odls_base_signal_direct_children_only=1
setsid mpirun --host "$(printf ",%s:$slots" "${hosts[@]}" | cut -c 2-)" \
    -x JAX_COORDINATOR_ADDRESS="${hosts[0]}:8476" "$rlhf" run pipeline.toml &
mpirun=$!
trap 'stopped=1; kill -USR1 $mpirun' TERM INT HUP
while stopped=; wait $mpirun; code=$?; [ $stopped ]; do :; done    # a signal ends `wait`, not mpirun
exit $code
