{{- /* What pods of the engine have in common, leaders and followers. `role` is the one of this pod. */ -}}
{{- define "cellgate.engine" -}}
{{- $root := .root }}
{{- $engine := $root.Values.engine }}
{{- $leads := eq .role "leader" }}
{{- $sidecar := eq $root.Values.mode "sidecar" -}}
- name: engine
  image: {{ $engine.image.repository }}:{{ $engine.image.tag }}
  command: [vllm, serve, {{ $engine.model | quote }}]
  args:
    - --tensor-parallel-size={{ $engine.tensorParallel }}
    - --pipeline-parallel-size={{ $engine.pipelineParallel }}
    {{- if gt (int $engine.nodes) 1 }}
    - --nnodes={{ $engine.nodes }}
    - --node-rank={{ ternary "0" "$(LWS_WORKER_INDEX)" $leads }}
    - --master-addr=$(LWS_LEADER_ADDRESS)
    {{- end }}
    {{- if not $leads }}
    - --headless
    {{- else if $sidecar }}
    # On 127.0.0.1: nothing gets past the gate.
    - --host=127.0.0.1
    - --port=8001
    {{- else }}
    - --port=8000
    {{- end }}
    {{- range $engine.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: HF_HOME, value: /models}
    {{- with $engine.token }}{{ if .secret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
    {{- end }}{{ end }}
    {{- if $root.Values.files.unitApiKey }}
    - name: VLLM_API_KEY
      valueFrom: {secretKeyRef: {name: {{ $root.Values.files.unitApiKey }}, key: api-key}}
    {{- end }}
    {{- with $engine.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $engine.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $leads }}
  {{- $port := ternary 8001 8000 $sidecar }}
  {{- if not $sidecar }}
  ports:
    - {name: http, containerPort: 8000}
  readinessProbe:
    httpGet: {path: /health, port: http}
    timeoutSeconds: 5
  {{- end }}
  # Kubernetes restarts what does not start; whether it generates is the gate's to find out.
  startupProbe:
    {{- if $sidecar }}
    exec: {command: [python3, -c, "import socket; socket.create_connection(('127.0.0.1', {{ $port }}), 2)"]}
    timeoutSeconds: 5
    {{- else }}
    tcpSocket: {port: {{ $port }}}
    {{- end }}
    periodSeconds: 10
    failureThreshold: {{ div $engine.startupSeconds 10 }}
  {{- end }}
  lifecycle: {{- include "cellgate.stays" . | nindent 4 }}
  resources:
    {{- with $engine.resources.requests }}
    requests: {{- toYaml . | nindent 6 }}
    {{- end }}
    limits:
      {{ $engine.gpuResource }}: {{ $engine.gpusPerNode | quote }}
      {{- with $engine.resources.limits }}{{ toYaml . | nindent 6 }}{{ end }}
  volumeMounts:
    - {name: shm, mountPath: /dev/shm}
    - {name: models, mountPath: /models}
    {{- with $engine.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
  # Without ptrace: the memory, files and variables of a gate or an agent in this pod, of other users, stay theirs.
  securityContext: {{- toYaml $engine.securityContext | nindent 4 }}
- name: cellgate-agent
  image: {{ include "cellgate.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [cellgate, agent]
  args:
    {{- if $leads }}
    - --match=VLLM::EngineCore
    {{- end }}
    - --match=VLLM::Worker
    {{- if not (and $leads $sidecar) }}
    - --listen=0.0.0.0:9911
    {{- end }}
    - --token-file=/etc/cellgate-secrets/agent-token
  volumeMounts:
    - {name: agent-token, mountPath: /etc/cellgate-secrets, readOnly: true}
  {{- if not (and $leads $sidecar) }}
  ports:
    - {name: agent, containerPort: 9911}
  {{- end }}
  lifecycle: {{- include "cellgate.stays" . | nindent 4 }}
  resources:
    requests: {cpu: 20m, memory: 32Mi}
    limits: {memory: 64Mi}         # no CPU limit: a throttled agent misses beats
  securityContext:
    runAsNonRoot: true
    runAsUser: 65534
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
{{- end }}

{{- /* In a cell a gate hears of the deletion at once, and streams have this long to end. Beside a sidecar, and on
its followers, it stays for as long as the gate has streams. */ -}}
{{- define "cellgate.stays" -}}
{{- if eq .root.Values.mode "sidecar" -}}
preStop:
  exec:
    command:
      - sh
      - -c
      - |
        while python3 -c "import socket; socket.create_connection(('{{ ternary "127.0.0.1" "$LWS_LEADER_ADDRESS" (eq .role "leader") }}', 9901), 2)"
        do sleep 1; done 2>/dev/null
{{- else -}}
preStop: {exec: {command: [sleep, {{ .root.Values.engine.drainSeconds | quote }}]}}
{{- end }}
{{- end }}

{{- define "cellgate.enginePod" -}}
{{- $engine := .root.Values.engine }}
{{- $sidecar := eq .root.Values.mode "sidecar" -}}
metadata:
  labels: {{- include "cellgate.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- if and $sidecar (eq .role "leader") }}
    cellgate/gate: "true"
    {{- end }}
  {{- if and $sidecar (eq .role "leader") }}
  annotations: {prometheus.io/scrape: "true", prometheus.io/port: "9901"}
  {{- end }}
spec:
  automountServiceAccountToken: false
  # Without it the agent sees only itself. Each container is another user's, and none may trace others.
  shareProcessNamespace: true
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  # Above the preStop of all containers.
  terminationGracePeriodSeconds: {{ if $sidecar }}{{ include "cellgate.grace" .root }}{{ else }}{{ add $engine.drainSeconds 60 }}{{ end }}
  {{- with include "cellgate.placed" $engine | trim }}{{ . | nindent 2 }}{{ end }}
  containers:
    {{- if and $sidecar (eq .role "leader") }}
    {{- include "cellgate.container" .root | nindent 4 }}
    {{- end }}
    {{- include "cellgate.engine" . | nindent 4 }}
  volumes:
    - name: agent-token
      secret:
        secretName: {{ .root.Values.secret.name }}
        items: [{key: {{ .root.Values.secret.agentTokenKey }}, path: agent-token}]
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $engine.sharedMemory }}}
    - name: models
      {{- if $engine.cache.claim }}
      persistentVolumeClaim: {claimName: {{ $engine.cache.claim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $engine.cache.size }}}
      {{- end }}
    {{- with $engine.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- if and $sidecar (eq .role "leader") }}
    {{- include "cellgate.volumes" .root | nindent 4 }}
    {{- end }}
{{- end }}
