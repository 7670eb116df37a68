# Asks the program of this machine and prints its answer, or says why there is none. In bash, because a second
# Python takes a second under emulation.
exec 3<>/dev/tcp/127.0.0.1/7000 || exit 1
echo "$*" >&3
read -r verdict answer <&3
printf '%s\n' "$answer"
[ "$verdict" = ok ]
