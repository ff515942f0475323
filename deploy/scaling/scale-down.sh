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
until cellgate units --output json | python3 -c "
import json, sys
busy = {u['name']: u['in_flight'] for u in json.load(sys.stdin)}
sys.exit(busy.get('$unit', 0) > 0)"
do
    sleep 5
done
# Kubernetes removes the pod with the lowest cost first.
kubectl annotate pod "$unit" controller.kubernetes.io/pod-deletion-cost=-1 --overwrite
replicas=$(kubectl get deployment "$deployment" -o jsonpath='{.spec.replicas}')
kubectl scale deployment "$deployment" --current-replicas="$replicas" --replicas=$((replicas - 1))
