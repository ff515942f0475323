#!/bin/sh
# One unit fewer, where units are pods of a Deployment: the one whose cache is missed least goes, when its requests
# have ended. Units are named like their pods. The page: docs/autoscaling.md.
#
#   CELLGATE_ADMIN_TOKEN=... scale-down.sh DEPLOYMENT
set -eu
deployment=$1
drained=$(cellgate drain --least-valued)
unit=${drained%%:*}
echo "$drained"
# Its engine counts the requests of other gates, too; a unit that is gone has none.
until cellgate units --output json | python3 -c "
import json, sys
for unit in json.load(sys.stdin):
    if unit['name'] == '$unit':
        load = unit['load'] or {'running': 0, 'waiting': 0}
        sys.exit(unit['in_flight'] + load['running'] + load['waiting'] > 0)"
do
    sleep 5
done
# Kubernetes removes the pod with the lowest cost first.
kubectl annotate pod "$unit" controller.kubernetes.io/pod-deletion-cost=-1 --overwrite
replicas=$(kubectl get deployment "$deployment" -o jsonpath='{.spec.replicas}')
kubectl scale deployment "$deployment" --current-replicas="$replicas" --replicas=$((replicas - 1))
