#!/bin/sh
# Recovers a unit whose nodes are ECS services of one task each, named as the nodes are: stops the tasks of all
# of them, which ECS restarts. Needs the AWS CLI; the gate's role needs ecs:ListTasks and ecs:StopTask.
#
#   recovery: [{cell: NAME, command: [/etc/cellgate/ecs-stop-task.sh, CLUSTER], audit: ...}]
set -eu
cluster=$1
reason=$(printf '%.200s' "cellgate $CELLGATE_ID: $CELLGATE_REASON")
failed=0
found=0
old_ifs=$IFS
IFS=,
for node in $CELLGATE_NODES; do
  IFS=$old_ifs
  tasks=$(aws ecs list-tasks --cluster "$cluster" --service-name "$node" --query 'taskArns[]' --output text) \
    || { failed=1; continue; }
  for task in $tasks; do
    [ "$task" != None ] || continue
    found=1
    # One that fails must not spare the others: a unit is all of its nodes or nothing.
    aws ecs stop-task --cluster "$cluster" --task "$task" --reason "$reason" --query task.taskArn --output text \
      || failed=1
  done
done
[ "$found" = 1 ] || { echo "no task of $CELLGATE_NODES runs in $cluster" >&2; exit 3; }
exit $failed
