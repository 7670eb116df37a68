# Asks the environment of this machine for its state, which comes as one line of JSON. An argument is a note
# that it shall write into its history first. In bash, because a second Python takes a second under emulation.
exec 3<>/dev/tcp/127.0.0.1/7000 && echo "$1" >&3 && cat <&3
