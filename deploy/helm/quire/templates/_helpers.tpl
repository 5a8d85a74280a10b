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

{{/* Name of a component's objects. Those of a model's workers stay short enough for the pods of a StatefulSet. */}}
{{- define "quire.objectName" -}}
{{- $fullname := include "quire.fullname" .root -}}
{{- if hasPrefix "worker-" .component -}}
{{- $fullname = $fullname | trunc (int (sub 51 (len .component))) | trimSuffix "-" -}}
{{- end -}}
{{- printf "%s-%s" $fullname .component -}}
{{- end -}}

{{- define "quire.metadata" -}}
name: {{ include "quire.objectName" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "quire.labels" . | nindent 2 }}
{{- end -}}

{{/* Image of a service of ours: (dict "root" $ "image" .Values.gateway.image) */}}
{{- define "quire.image" -}}
{{- $tag := default (default .root.Chart.AppVersion .root.Values.image.tag) .image.tag -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ $tag }}
{{- end -}}

{{/* Minimal privileges of every container. */}}
{{- define "quire.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "quire.podSecurity" -}}
automountServiceAccountToken: false
# Kubernetes would set a variable for each Service, QUIRE_SCHEDULER_PORT among them.
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

{{/* Placement of a component's pods: (dict "values" .Values.worker "gpus" 1); gpus only if it has any. */}}
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

{{/* Variables of all three services. */}}
{{- define "quire.commonEnv" -}}
- name: QUIRE_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- with .Values.otel.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/*
What is served, as JSON: {"models": […]}. Each has the keys of values.yaml, `component` of its workers, and `workers`, `gpus` and
`resources` of these.
*/}}
{{- define "quire.models" -}}
{{- $worker := .Values.worker -}}
{{- $models := list -}}
{{- if .Values.models -}}
{{- $alone := pick .Values.model "name" "revision" "tokenizer" "tokenizerRevision" "servedModelName" "chatTemplate" "chatRoles" "generationConfig" "overrideGenerationConfig" -}}
{{- range $key, $value := $alone -}}
{{- if $value -}}
{{- fail (printf "model.%s cannot be set together with models: move it into an entry" $key) -}}
{{- end -}}
{{- end -}}
{{- $components := list -}}
{{- $names := list -}}
{{- range $model := .Values.models -}}
{{- $served := default (list (default "default" $model.name)) $model.servedModelName -}}
{{- $component := printf "worker-%s" (regexReplaceAll "[^a-z0-9]+" (first $served | lower) "-" | trimPrefix "-" | trunc 20 | trimSuffix "-") -}}
{{- if has $component $components -}}
{{- fail (printf "models: two entries have workers called %s: give one of them another servedModelName" $component) -}}
{{- end -}}
{{- $components = append $components $component -}}
{{- range $served -}}
{{- if has . $names -}}
{{- fail (printf "models: two entries have the name %s" .) -}}
{{- end -}}
{{- $names = append $names . -}}
{{- end -}}
{{- $entry := dict "component" $component "workers" 1 "gpus" $worker.gpus "resources" $worker.resources "dtype" $.Values.model.dtype "maxModelLen" $.Values.model.maxModelLen -}}
{{- /* `merge` would treat 0 as absent. */ -}}
{{- range $key, $value := $model -}}
{{- $_ := set $entry $key $value -}}
{{- end -}}
{{- $models = append $models $entry -}}
{{- end -}}
{{- else -}}
{{- $own := dict "component" "worker" "workers" $worker.replicas "gpus" $worker.gpus "resources" $worker.resources -}}
{{- $models = list (merge $own .Values.model) -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* Variables of containers that read models' files. */}}
{{- define "quire.cacheEnv" -}}
- name: QUIRE_CACHE_DIR
  value: /models/quire
- name: HF_HOME
  value: /models/huggingface
{{- end -}}

{{/* The same, with those that name a model. */}}
{{- define "quire.modelEnv" -}}
{{ include "quire.cacheEnv" . }}
{{- with .name }}
- name: QUIRE_MODEL
  value: {{ . | quote }}
{{- end }}
{{- with .revision }}
- name: QUIRE_REVISION
  value: {{ . | quote }}
{{- end }}
{{- with .tokenizer }}
- name: QUIRE_TOKENIZER
  value: {{ . | quote }}
{{- end }}
{{- with .tokenizerRevision }}
- name: QUIRE_TOKENIZER_REVISION
  value: {{ . | quote }}
{{- end }}
{{- with .servedModelName }}
- name: QUIRE_SERVED_MODEL_NAME
  value: {{ join "," . | quote }}
{{- end }}
{{- end -}}

{{/* The TOML file of several models. JSON strings are valid TOML. */}}
{{- define "quire.modelsFile" -}}
{{- range (include "quire.models" . | fromJson).models }}
[[models]]
{{- range $key, $value := dict "model" .name "revision" .revision "tokenizer" .tokenizer "tokenizer_revision" .tokenizerRevision "served_model_name" .servedModelName "chat_template" .chatTemplate "chat_roles" .chatRoles "generation_config" .generationConfig }}
{{- with $value }}
{{ $key }} = {{ . | toJson }}
{{- end }}
{{- end }}
{{- with .overrideGenerationConfig }}
[models.override_generation_config]
{{- range $key, $value := . }}
{{ $key }} = {{ $value | toJson }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{/*
Prepares a model's files. Gateways read the tokenizer, so their pods run this too, with the worker's image: only that
image can convert a model. On a shared volume one pod works and the others wait for it.
(dict "root" $ "model" $model "resources" .Values.worker.prepareResources)
*/}}
{{- define "quire.prepareContainer" -}}
- name: {{ .model.component | replace "worker" "prepare-model" }}
  image: {{ include "quire.image" (dict "root" .root "image" .root.Values.worker.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, worker_svc.prepare]
  env:
    {{- include "quire.modelEnv" .model | nindent 4 }}
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

{{/* The headless Service of each model's workers: one DNS name for all ready workers. */}}
{{- define "quire.workers" -}}
{{- $addresses := list -}}
{{- range (include "quire.models" . | fromJson).models -}}
{{- $addresses = append $addresses (printf "%s:50053" (include "quire.objectName" (dict "root" $ "component" .component))) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{- /* The addresses of all schedulers, for gateways. */}}
{{- define "quire.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "quire.fullname" .) -}}
{{- $addresses := list -}}
{{- range until (int .Values.scheduler.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:50052" $name . $name) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}
