#!/bin/sh
# Recovers a unit that is one group of a LeaderWorkerSet: deletes all pods of the group, which is made again as a
# whole. The unit is named after its leader's pod, SET-INDEX (such as llama-0). Needs kubectl, and the rights in
# lws-rbac.yaml.
#
#   recovery: [{cell: NAME, command: [/etc/cellgate/lws-delete-group.sh, NAMESPACE], audit: ...}]
set -eu
namespace=$1
set=${CELLGATE_UNIT%-*}
index=${CELLGATE_UNIT##*-}
case $index in
  '' | *[!0-9]*) echo "unit $CELLGATE_UNIT is not named SET-INDEX" >&2; exit 2 ;;
esac
labels=leaderworkerset.sigs.k8s.io
# Not waited for: the gate sees for itself when the unit is back.
exec kubectl --namespace "$namespace" --request-timeout=20s delete pod --wait=false \
  --selector "$labels/name=$set,$labels/group-index=$index"
