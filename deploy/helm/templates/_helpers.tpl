{{- define "cellgate.validate" -}}
{{- if not (has .Values.mode (list "cell" "sidecar" "fleet")) }}
{{- fail (printf "mode: expected cell, sidecar or fleet, found %s" .Values.mode) }}
{{- end }}
{{- range $what, $found := dict "image.repository" .Values.image.repository "secret.name" .Values.secret.name }}
{{- include "cellgate.required" (list $what $found) }}
{{- end }}
{{- $name := include "cellgate.name" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- $what := ternary "fullnameOverride" "the release" (ne .Values.fullnameOverride "") }}
{{- fail (printf "%s: expected a DNS label that begins with a letter, found %s: Services cannot be called so" $what $name) }}
{{- end }}
{{- if not (has .Values.service.type (list "ClusterIP" "NodePort" "LoadBalancer")) }}
{{- fail (printf "service.type: expected ClusterIP, NodePort or LoadBalancer, found %s" .Values.service.type) }}
{{- end }}
{{- range $what, $found := dict "gate.replicas" .Values.gate.replicas "service.port" .Values.service.port "drain.seconds" .Values.drain.seconds }}
{{- include "cellgate.counted" (list $what $found) }}
{{- end }}
{{- if and .Values.route.enabled (not .Values.route.parentRefs) }}
{{- fail "route.parentRefs: name the Gateway that the route is of" }}
{{- end }}
{{- if and .Values.files.usageLog (not .Values.files.keys) (not .Values.config.keys) }}
{{- fail "files.usageLog: what is logged is the use of keys: give files.keys as well" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.operators) (or .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled) }}
{{- fail "networkPolicy.operators: name the namespace of Prometheus, which else cannot reach what monitoring tells it to scrape" }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if and .gate.enabled (lt (int .gate.maxReplicas) (int $.Values.gate.replicas)) }}
{{- fail (printf "autoscaling.gate.maxReplicas: expected at least gate.replicas, which is %v" $.Values.gate.replicas) }}
{{- end }}
{{- if and .units.enabled (lt (int .units.maxUnits) (int .units.minUnits)) }}
{{- fail (printf "autoscaling.units.maxUnits: expected at least minUnits, which is %v" .units.minUnits) }}
{{- end }}
{{- end }}
{{- if and .Values.engine.create (ne .Values.mode "fleet") }}
{{- include "cellgate.validateEngine" . }}
{{- else if and (eq .Values.mode "cell") (not .Values.config.cells) }}
{{- fail "engine.create is false: name the units in config.cells" }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") (not .Values.engine.create) }}
{{- fail "mode sidecar has its gates in the engines' pods: engine.create must be true" }}
{{- end }}
{{- end }}

{{- define "cellgate.validateEngine" -}}
{{- with .Values.engine }}
{{- range $what, $found := dict "engine.model" .model "engine.cell" .cell "engine.image.repository" .image.repository "engine.image.tag" .image.tag }}
{{- include "cellgate.required" (list $what $found) }}
{{- end }}
{{- /* Pods, and what Kubernetes derives of them, are called so with up to 18 characters more. */ -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$" .name) }}
{{- fail (printf "engine.name: expected a DNS label (a-z, 0-9 and -, a letter first, at most 45), found %q" .name) }}
{{- end }}
{{- if has .name (list (include "cellgate.name" $) (printf "%s-admin" (include "cellgate.name" $))) }}
{{- fail (printf "engine.name: %s is a Service of the release already: choose another name" .name) }}
{{- end }}
{{- range $what, $found := dict "units" .units "nodes" .nodes "gpusPerNode" .gpusPerNode "maxInFlight" .maxInFlight }}
{{- include "cellgate.counted" (list (printf "engine.%s" $what) $found) }}
{{- end }}
{{- $ranks := mul .tensorParallel .pipelineParallel }}
{{- $gpus := mul .nodes .gpusPerNode }}
{{- if ne $ranks $gpus }}
{{- fail (printf "engine: tensorParallel x pipelineParallel is %d, but nodes x gpusPerNode is %d: make them equal" $ranks $gpus) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A value that nobody can choose for others: there, and no stand-in of an example. */ -}}
{{- define "cellgate.required" -}}
{{- $what := first . }}
{{- $found := last . }}
{{- if not (trim $found) }}
{{- fail (printf "%s: is required, and empty" $what) }}
{{- else if regexMatch "(?i:(^|/)your[-_])|(^|/)(ORG|MODEL)($|/)|[<>${}]" $found }}
{{- fail (printf "%s: %s stands for something of yours: replace it" $what $found) }}
{{- end }}
{{- end }}

{{- define "cellgate.counted" -}}
{{- if lt (int (last .)) 1 }}
{{- fail (printf "%s: expected at least 1, found %v" (first .) (last .)) }}
{{- end }}
{{- end }}

{{- define "cellgate.labels" -}}
app.kubernetes.io/name: cellgate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* What objects are called. */ -}}
{{- define "cellgate.name" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "cellgate.image" -}}
{{- with .Values.image }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* drain_delay_s + drain_s and a little. SIGTERM does all: no preStop is needed. */ -}}
{{- define "cellgate.grace" -}}
{{ add .Values.drain.delaySeconds .Values.drain.seconds 15 }}
{{- end }}

{{- /* The configuration of the mode, with what `config` says on top. */ -}}
{{- define "cellgate.config" -}}
{{- $made := dict "timeouts" (dict "drain_delay_s" .Values.drain.delaySeconds "drain_s" .Values.drain.seconds) }}
{{- range $name := ternary (ternary (list "admin-token" "fleet-secret" "redis-password") (list "admin-token" "fleet-secret") .Values.redis.create) (list "admin-token" "agent-token") (eq .Values.mode "fleet") }}
{{- $_ := set $made (printf "%s_file" (replace "-" "_" $name)) (printf "/etc/cellgate-secrets/%s" $name) }}
{{- end }}
{{- if .Values.operator }}
{{- $_ := set $made "operator" "/etc/cellgate/operator.yaml" }}
{{- end }}
{{- $engine := .Values.engine }}
{{- with .Values.files }}
{{- if .keys }}{{ $_ := set $made "keys" (dict "file" "/etc/cellgate-files/keys/keys.jsonl") }}{{ end }}
{{- if .usageLog }}{{ $_ := set $made "usage_log" "/var/log/cellgate/${POD_NAME}.jsonl" }}{{ end }}
{{- $tls := dict }}
{{- if .tls }}{{ $_ := merge $tls (dict "cert" "/etc/cellgate-files/tls/tls.crt" "key" "/etc/cellgate-files/tls/tls.key") }}{{ end }}
{{- if .adminTls }}{{ $_ := merge $tls (dict "admin_cert" "/etc/cellgate-files/adminTls/tls.crt" "admin_key" "/etc/cellgate-files/adminTls/tls.key") }}{{ end }}
{{- if and $.Values.redis.tls (eq $.Values.mode "fleet") }}{{ $_ := set $tls "ca" "/etc/cellgate-files/redis/ca.crt" }}{{ end }}
{{- if $tls }}{{ $_ := set $made "tls" $tls }}{{ end }}
{{- end }}
{{- $unit := dict "engine" "vllm" "max_in_flight" $engine.maxInFlight }}
{{- if .Values.files.unitApiKey }}{{ $_ := set $unit "api_key_file" "/etc/cellgate-files/unitApiKey/api-key" }}{{ end }}
{{- if eq .Values.mode "fleet" }}
{{- $_ := set $made "discovery" "redis" }}
{{- $_ := set $made "redis" (printf "%s://%s-redis:6379/0" (ternary "rediss" "redis" (ne .Values.redis.tls "")) (include "cellgate.name" .)) }}
{{- else if and (eq .Values.mode "cell") $engine.create }}
{{- $found := dict "from" "lws" "name" $engine.name "port" 8000 "agent_port" 9911 "unit" $unit }}
{{- $_ := set $made "cells" (list (dict "name" $engine.cell "discover" $found)) }}
{{- else if eq .Values.mode "sidecar" }}
{{- /* The gate's own variable: the name of its pod, as the set names its leaders. */ -}}
{{- $nodes := list (dict "name" "${POD_NAME}" "role" "leader" "agent" "127.0.0.1:9911") }}
{{- range $rank := until (int $engine.nodes) }}
{{- if $rank }}
{{- $nodes = append $nodes (dict "name" (printf "${POD_NAME}-%d" $rank) "role" "follower" "agent" (printf "${POD_NAME}-%d.%s:9911" $rank $engine.name)) }}
{{- end }}
{{- end }}
{{- $_ := merge $unit (dict "name" "${POD_NAME}" "url" "http://127.0.0.1:8001" "nodes" $nodes) }}
{{- $_ := set $made "cells" (list (dict "name" $engine.cell "units" (list $unit))) }}
{{- end }}
{{- toYaml (mergeOverwrite $made (deepCopy .Values.config)) }}
{{- end }}

{{- /* The gate as a container: the same beside an engine and alone. */ -}}
{{- define "cellgate.container" -}}
- name: cellgate
  image: {{ include "cellgate.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- /* What every release has is in files: variables are in crash reports, and children have them. */ -}}
    {{- if ne .Values.mode "fleet" }}
    - name: CELLGATE_FLEET_SECRET
      valueFrom: {secretKeyRef: {name: {{ .Values.secret.name }}, key: {{ .Values.secret.fleetSecretKey }}, optional: true}}
    {{- end }}
    {{- if or (ne .Values.mode "fleet") (not .Values.redis.create) }}
    - name: CELLGATE_REDIS_PASSWORD
      valueFrom: {secretKeyRef: {name: {{ .Values.secret.name }}, key: {{ .Values.secret.redisPasswordKey }}, optional: true}}
    {{- end }}
    {{- if and .Values.files.unitApiKey (or (eq .Values.mode "fleet") (not .Values.engine.create)) }}
    # Of units that the chart did not make.
    - name: CELLGATE_UNIT_API_KEY
      valueFrom: {secretKeyRef: {name: {{ .Values.files.unitApiKey }}, key: api-key}}
    {{- end }}
    {{- with .Values.gate.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .Values.gate.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: admin, containerPort: 9901}
  readinessProbe:
    httpGet: {path: /readyz, port: admin}
    periodSeconds: 1
    timeoutSeconds: 1
    failureThreshold: 2
  # Never by /readyz: a gate without units is not ready, and a restart would cure nothing.
  livenessProbe:
    httpGet: {path: /livez, port: admin}
    periodSeconds: 10
    timeoutSeconds: 3
    failureThreshold: 3
  resources: {{- toYaml .Values.gate.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  volumeMounts:
    - {name: config, mountPath: /etc/cellgate, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: secrets, mountPath: /etc/cellgate-secrets, readOnly: true}
    {{- if and .Values.redis.tls (eq .Values.mode "fleet") }}
    - {name: redis-ca, mountPath: /etc/cellgate-files/redis, readOnly: true}
    {{- end }}
    {{- range $name, $of := .Values.files }}{{ if $of }}
    {{- if eq $name "usageLog" }}
    - {name: usage-log, mountPath: /var/log/cellgate}
    {{- else }}
    - {name: {{ kebabcase $name }}, mountPath: /etc/cellgate-files/{{ $name }}, readOnly: true}
    {{- end }}
    {{- end }}{{ end }}
    {{- with .Values.gate.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{- define "cellgate.volumes" -}}
- name: config
  configMap: {name: {{ include "cellgate.name" . }}}
- name: secrets
  secret:
    secretName: {{ .Values.secret.name }}
    items:
      - {key: {{ .Values.secret.adminTokenKey }}, path: admin-token}
      {{- if ne .Values.mode "fleet" }}
      - {key: {{ .Values.secret.agentTokenKey }}, path: agent-token}
      {{- else }}
      - {key: {{ .Values.secret.fleetSecretKey }}, path: fleet-secret}
      {{- if .Values.redis.create }}
      - {key: {{ .Values.secret.redisPasswordKey }}, path: redis-password}
      {{- end }}
      {{- end }}
- name: tmp
  emptyDir: {}
{{- if and .Values.redis.tls (eq .Values.mode "fleet") }}
- name: redis-ca
  secret: {secretName: {{ .Values.redis.tls }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- range $name, $of := .Values.files }}{{ if $of }}
- name: {{ kebabcase $name }}
  {{- if eq $name "usageLog" }}
  persistentVolumeClaim: {claimName: {{ $of }}}
  {{- else }}
  secret: {secretName: {{ $of }}}
  {{- end }}
{{- end }}{{ end }}
{{- with .Values.gate.extraVolumes }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{- /* Where pods go. The values are those of the gate, or of the engine. */ -}}
{{- define "cellgate.placed" -}}
{{- range $key := list "nodeSelector" "affinity" "tolerations" "topologySpreadConstraints" }}
{{- with get $ $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}
