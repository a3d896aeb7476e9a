#!/bin/sh
# Speaks as nvidia-cuda-mps-control does. Its daemon is a sleeping process; the file `clients` beside its pid says who uses it.
pipes=$CUDA_MPS_PIPE_DIRECTORY
pid=$pipes/nvidia-cuda-mps-control.pid
alive() { [ -f "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; }
clients() { cat "$pipes/clients" 2>/dev/null; }

case $FAKE_MPS in
hang) exec sleep 60 ;;
fail) echo "no GPU that it could share" >&2; exit 1 ;;
esac

if [ "$1" = -d ]; then
    if alive; then echo "An instance of this daemon is already running"; exit 1; fi
    sleep 120 </dev/null & # keeps our output open, as a daemon may
    echo $! >"$pid"
    touch "$pipes/control"
    env >"$pipes/environment"
    exit 0
fi

if ! alive; then echo "Cannot find MPS control daemon process"; exit 0; fi # the words say it, whatever the status
read -r command server
case $command in
get_server_list) if [ -n "$(clients)" ]; then echo 4711; fi ;;
get_client_list) if [ "$server" = 4711 ]; then clients; fi ;;
quit) # waits for all clients; the socket is left behind
    for client in $(clients); do
        while kill -0 "$client" 2>/dev/null; do sleep 0.05; done
    done
    kill "$(cat "$pid")"
    rm "$pid" ;;
esac
