{{- define "cellgate.validate" -}}
{{- if not (has .Values.mode (list "cell" "sidecar" "fleet")) }}
{{- fail (printf "mode: expected cell, sidecar or fleet, found %s" .Values.mode) }}
{{- end }}
{{- with .Values.engine }}
{{- $ranks := mul .tensorParallel .pipelineParallel }}
{{- $gpus := mul .nodes .gpusPerNode }}
{{- if and .create (ne $ranks $gpus) }}
{{- fail (printf "engine: tensorParallel x pipelineParallel is %d, but nodes x gpusPerNode is %d: make them equal" $ranks $gpus) }}
{{- end }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") (not .Values.engine.create) }}
{{- fail "mode sidecar has its gates in the engines' pods: engine.create must be true" }}
{{- end }}
{{- end }}

{{- define "cellgate.labels" -}}
app.kubernetes.io/name: cellgate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cellgate.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* drain_delay_s + drain_s and a little. SIGTERM does all: no preStop is needed. */ -}}
{{- define "cellgate.grace" -}}
{{ add .Values.drain.delaySeconds .Values.drain.seconds 15 }}
{{- end }}

{{- /* The configuration of the mode, with what `config` says on top. */ -}}
{{- define "cellgate.config" -}}
{{- $made := dict "timeouts" (dict "drain_delay_s" .Values.drain.delaySeconds "drain_s" .Values.drain.seconds) }}
{{- $engine := .Values.engine }}
{{- if eq .Values.mode "fleet" }}
{{- $_ := set $made "discovery" "redis" }}
{{- $_ := set $made "redis" (printf "redis://%s-redis:6379/0" .Release.Name) }}
{{- else if and (eq .Values.mode "cell") $engine.create }}
{{- $unit := dict "engine" "vllm" "max_in_flight" $engine.maxInFlight }}
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
{{- $unit := dict "name" "${POD_NAME}" "url" "http://127.0.0.1:8001" "engine" "vllm" "max_in_flight" $engine.maxInFlight "nodes" $nodes }}
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
    - name: CELLGATE_ADMIN_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .Values.secret.name }}, key: {{ .Values.secret.adminTokenKey }}}}
    {{- if ne .Values.mode "fleet" }}
    - name: CELLGATE_AGENT_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .Values.secret.name }}, key: {{ .Values.secret.agentTokenKey }}}}
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
{{- end }}

{{- define "cellgate.volumes" -}}
- name: config
  configMap: {name: {{ .Release.Name }}}
- name: tmp
  emptyDir: {}
{{- end }}
