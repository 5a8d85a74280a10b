{{/* Names */}}
{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "quire.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "quire.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quire.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "quire.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels of a component: (dict "root" $ "component" "gateway") */}}
{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ include "quire.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: quire
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quire.metadata" -}}
name: {{ include "quire.fullname" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "quire.labels" . | nindent 2 }}
{{- end -}}

{{/* Image of a service of ours: (dict "root" $ "image" .Values.gateway.image) */}}
{{- define "quire.image" -}}
{{- $tag := default (default .root.Chart.AppVersion .root.Values.image.tag) .image.tag -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ $tag }}
{{- end -}}

{{/* What every container may do: nothing that it need not. */}}
{{- define "quire.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "quire.podSecurity" -}}
automountServiceAccountToken: false
# Kubernetes would set variables after Services, QUIRE_SCHEDULER_PORT among them.
enableServiceLinks: false
serviceAccountName: {{ include "quire.serviceAccountName" .root }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where the pods of a component may run: (dict "values" .Values.worker "gpus" 1), without gpus where it has none. */}}
{{- define "quire.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $gpuNodes := ternary (list (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule")) list (gt (int .gpus) 0) }}
{{- with concat .values.tolerations $gpuNodes }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables that all three services take. */}}
{{- define "quire.commonEnv" -}}
- name: QUIRE_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- with .Values.otel.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Variables of what reads the model's files. */}}
{{- define "quire.modelEnv" -}}
- name: QUIRE_CACHE_DIR
  value: /models/quire
- name: HF_HOME
  value: /models/huggingface
{{- with .Values.model.name }}
- name: QUIRE_MODEL
  value: {{ . | quote }}
{{- end }}
{{- with .Values.model.revision }}
- name: QUIRE_REVISION
  value: {{ . | quote }}
{{- end }}
{{- with .Values.model.tokenizer }}
- name: QUIRE_TOKENIZER
  value: {{ . | quote }}
{{- end }}
{{- with .Values.model.tokenizerRevision }}
- name: QUIRE_TOKENIZER_REVISION
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/*
Prepares the model's files. Gateways read the tokenizer among them, so their pods run this too, with the worker's image:
it alone can convert a model. On a shared volume one pod works and the others wait for it.
*/}}
{{- define "quire.prepareContainer" -}}
- name: prepare-model
  image: {{ include "quire.image" (dict "root" .root "image" .root.Values.worker.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, worker_svc.prepare]
  env:
    {{- include "quire.modelEnv" .root | nindent 4 }}
    {{- with .root.Values.model.hubToken }}
    {{- if .existingSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .existingSecret }}
          key: {{ .key }}
    {{- end }}
    {{- end }}
  {{- include "quire.containerSecurity" . | nindent 2 }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "quire.modelVolume" -}}
- name: models
  {{- with .Values.model.volume }}
  {{- if .existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .existingClaim }}
  {{- else if .hostPath }}
  hostPath:
    path: {{ .hostPath }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ .emptyDirSizeLimit }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Secret that holds the password of the chart's own Redis. */}}
{{- define "quire.redisSecret" -}}
{{- default (printf "%s-redis" (include "quire.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{- define "quire.redisEnv" -}}
{{- if .Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.redisSecret" . }}
      key: {{ .Values.redis.key }}
- name: QUIRE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "quire.fullname" . }}-redis:6379/0
{{- else if .Values.redis.externalUrlSecret.name -}}
- name: QUIRE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.externalUrlSecret.name }}
      key: {{ .Values.redis.externalUrlSecret.key }}
{{- else -}}
- name: QUIRE_REDIS_URL
  value: {{ required "redis.externalUrl or redis.externalUrlSecret.name is needed where redis.enabled is false" .Values.redis.externalUrl | quote }}
{{- end -}}
{{- end -}}

{{- /* Every scheduler by its own name, as gateways are told. */}}
{{- define "quire.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "quire.fullname" .) -}}
{{- $addresses := list -}}
{{- range until (int .Values.scheduler.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:50052" $name . $name) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}
