{{- define "geartrain.name" -}}
{{- $name := contains "geartrain" .Release.Name | ternary .Release.Name (printf "%s-geartrain" .Release.Name) }}
{{- $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "geartrain.scheduler" -}}
{{ include "geartrain.name" . }}-scheduler:7000
{{- end }}

{{- /* Which pods: of (chart, role). */ -}}
{{- define "geartrain.selector" -}}
app.kubernetes.io/name: geartrain
app.kubernetes.io/instance: {{ .chart.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "geartrain.labels" -}}
{{ include "geartrain.selector" . }}
app.kubernetes.io/version: {{ .chart.Chart.AppVersion | quote }}
{{- end }}


{{- /* The spec of a pod, as YAML: of (chart, role, values, command; probes, grace, preStop, claims, restart). The
role's values.pod is laid over it. */ -}}
{{- define "geartrain.pod" -}}
{{- $values := .chart.Values }}
{{- $name := include "geartrain.name" .chart }}
{{- $secret := eq .role "worker" | ternary "client" .role }}
{{- $snapshots := or (has .role (list "server" "graph" "worker")) (and (eq .role "serve") .values.follow) }}
serviceAccountName: {{ $name }}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true # so that no process of ours is number 1, which signals do not end before it handles them
terminationGracePeriodSeconds: {{ .grace }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .restart }}
restartPolicy: {{ . }}
{{- end }}
containers:
  - name: {{ .role }}
    image: "{{ $values.image.repository }}:{{ $values.image.tag | default .chart.Chart.AppVersion }}"
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: {{ toJson .command }}
    {{- if ne .role "worker" }}
    args:
      {{- range .args }}
      - {{ . | quote }}
      {{- end }}
      {{- if $values.security.insecure }}
      - --insecure
      {{- end }}
      {{- if $values.metrics.enabled }}
      - --metrics=0.0.0.0:{{ $values.metrics.port }}
      {{- end }}
      {{- if and (has .role (list "server" "graph")) $values.snapshots.roots }}
      - --snapshot-roots={{ join "," $values.snapshots.roots }}
      {{- end }}
      {{- range .values.args }}
      - {{ . | quote }}
      {{- end }}
    ports:
      - {name: {{ eq .role "serve" | ternary "http" "grpc" }}, containerPort: 7000}
      {{- if eq .role "server" }}
      - {name: rows, containerPort: 7500}
      {{- else if eq .role "serve" }}
      - {name: grpc, containerPort: 7001}
      {{- end }}
      {{- if $values.metrics.enabled }}
      - {name: metrics, containerPort: {{ $values.metrics.port }}}
      {{- end }}
    startupProbe: # a role waits for the scheduler, and that for its volume
      exec: {command: [geartrain, health, "127.0.0.1:7000"]}
      periodSeconds: 3
      timeoutSeconds: 10
      failureThreshold: 100
    readinessProbe:
      exec: {command: [geartrain, health, "127.0.0.1:7000"{{ if eq .role "server" }}, --service, ready{{ end }}]}
      periodSeconds: 10
      timeoutSeconds: 10
    {{- if has .role (list "scheduler" "serve") }}
    livenessProbe: # the others have none: what ends a shard ends its rows, however slow it is
      exec: {command: [geartrain, health, "127.0.0.1:7000"]}
      periodSeconds: 20
      timeoutSeconds: 15
      failureThreshold: 6
    {{- end }}
    {{- if eq .role "serve" }}
    lifecycle:
      preStop: # questions come until the Service has heard that the pod goes
        exec: {command: [sleep, "5"]}
    {{- else if eq .role "scheduler" }}
    lifecycle:
      preStop: # servers that are told to end at the same time have said so by then; it waits for them
        exec: {command: [sleep, "3"]}
    {{- end }}
    {{- end }}
    env:
      - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
      - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
      {{- if eq .role "server" }}
      - {name: GEARTRAIN_SERVER__SHARD, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
      {{- end }}
      - {name: GEARTRAIN_SECURITY__FOLDER, value: {{ $values.security.insecure | ternary "none" "/certs" }}}
      {{- if eq .role "worker" }}
      - {name: SCHEDULER, value: "{{ include "geartrain.scheduler" .chart }}"}
      - {name: SNAPSHOTS, value: {{ .snapshots | quote }}}
      - {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "{{ .grace }}"} # else torchrun kills ranks that save after 30 s
      {{- if .values.token }}
      - {name: GEARTRAIN_SECURITY__TOKEN, value: /token/token}
      {{- end }}
      {{- if $values.graph.enabled }}
      - {name: GEARTRAIN_CLIENT__GRAPH, value: "{{ $name }}-graph:7000"}
      {{- end }}
      {{- end }}
      {{- if $snapshots }}
      {{- range $key, $value := $values.snapshots.env }}
      - {name: {{ $key }}, value: {{ $value | quote }}}
      {{- end }}
      {{- end }}
      {{- with .values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if and $snapshots $values.snapshots.credentials }}
    envFrom:
      - secretRef: {name: {{ $values.snapshots.credentials }}}
    {{- end }}
    resources: {{- toYaml .values.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: home, mountPath: /home/geartrain}
      {{- if .values.storage }}
      - {name: data, mountPath: /data}
      {{- end }}
      {{- if and (eq .role "serve") .values.claim }}
      - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
      {{- if eq .role "worker" }}
      - {name: shm, mountPath: /dev/shm}
      {{- if .values.token }}
      - {name: token, mountPath: /token, readOnly: true}
      {{- end }}
      {{- end }}
      {{- if not $values.security.insecure }}
      - {name: certs, mountPath: /certs, readOnly: true}
      {{- end }}
      {{- if and $snapshots $values.snapshots.claim }}
      - {name: snapshots, mountPath: /snapshots}
      {{- end }}
      {{- with .values.volumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  - {name: home, emptyDir: {}}
  {{- if eq .role "worker" }}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .values.sharedMemory }}}}
  {{- if .values.token }}
  - {name: token, secret: {secretName: {{ .values.token }}, defaultMode: 0400}}
  {{- end }}
  {{- end }}
  {{- if not $values.security.insecure }}
  - {name: certs, secret: {secretName: {{ $values.security.secretPrefix | default $name }}-{{ $secret }}, defaultMode: 0400}}
  {{- end }}
  {{- if and (eq .role "serve") .values.claim }}
  - {name: models, persistentVolumeClaim: {claimName: {{ .values.claim }}, readOnly: true}}
  {{- end }}
  {{- if and $snapshots $values.snapshots.claim }}
  - {name: snapshots, persistentVolumeClaim: {claimName: {{ $values.snapshots.claim }}}}
  {{- end }}
  {{- with .values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if has .role (list "server" "serve") }}
topologySpreadConstraints: # a lost node takes few of them with it
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "geartrain.selector" (dict "chart" .chart "role" .role) | nindent 8 }}
{{- end }}
{{- end }}

{{- /* A ServiceMonitor: of (chart, role). */ -}}
{{- define "geartrain.monitor" -}}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ include "geartrain.name" .chart }}-{{ .role }}
  labels: {{- merge (include "geartrain.labels" . | fromYaml) .chart.Values.metrics.labels | toYaml | nindent 4 }}
spec:
  selector:
    matchLabels: {{- include "geartrain.selector" . | nindent 6 }}
  endpoints:
    - port: metrics
      interval: {{ .chart.Values.metrics.interval }}
      {{- if not .chart.Values.security.insecure }}
      {{- $client := printf "%s-client" (.chart.Values.security.secretPrefix | default (include "geartrain.name" .chart)) }}
      scheme: https
      tlsConfig:
        serverName: {{ .role }}.{{ .chart.Values.security.cluster }}.geartrain
        ca: {secret: {name: {{ $client }}, key: ca.pem}}
        cert: {secret: {name: {{ $client }}, key: client.pem}}
        keySecret: {name: {{ $client }}, key: client.pem}
      {{- end }}
{{- end }}
