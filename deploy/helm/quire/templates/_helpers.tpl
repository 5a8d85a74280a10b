{{/* Names */}}
{{- define "quire.name" -}}
{{- regexReplaceAll "[-_.]+$" (default .Chart.Name .Values.nameOverride | trunc 50) "" -}}
{{- end -}}

{{/*
A DNS label of at most `max` characters: the name itself if it is one; otherwise its valid characters and a hash of it, so
that different names stay different. (dict "name" "a.b" "max" 42)
*/}}
{{- define "quire.dnsLabel" -}}
{{- if and (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .name) (le (len .name) (int .max)) -}}
{{- .name -}}
{{- else -}}
{{- $valid := regexReplaceAll "[^a-z0-9]+" (lower .name) "-" | trimPrefix "-" -}}
{{- /* A Service's name begins with a letter. */ -}}
{{- $valid = regexReplaceAll "^([0-9])" $valid "n${1}" -}}
{{- printf "%s-%s" ($valid | trunc (int (sub .max 9)) | trimSuffix "-") (sha256sum .name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* The name that the names of all objects are made of, of any length. */}}
{{- define "quire.wholeName" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains (include "quire.name" .) .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "quire.name" .) -}}
{{- end -}}
{{- end -}}

{{/* The same as a DNS label, so short that the name of any component but a model's workers may follow it. */}}
{{- define "quire.fullname" -}}
{{- include "quire.dnsLabel" (dict "name" (include "quire.wholeName" .) "max" 42) -}}
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
app.kubernetes.io/name: {{ include "quire.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Those of `commonLabels` replace others of the same name; values.schema.json refuses the selector's. */}}
{{- define "quire.labels" -}}
{{- $labels := include "quire.selectorLabels" . | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "quire" -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge (dict) (default dict .root.Values.commonLabels) $labels | toYaml -}}
{{- end -}}

{{/*
Name of a component's objects, of at most 52 characters: the pods of a StatefulSet have a label with its name, "-" and a
hash of up to 10 characters, and a label has at most 63.
*/}}
{{- define "quire.objectName" -}}
{{- $max := min 42 (sub 51 (len .component)) -}}
{{- printf "%s-%s" (include "quire.dnsLabel" (dict "name" (include "quire.wholeName" .root) "max" $max)) .component -}}
{{- end -}}

{{- define "quire.metadata" -}}
name: {{ include "quire.objectName" . }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "quire.labels" . | nindent 2 }}
{{- end -}}

{{/* Spec of a PodDisruptionBudget: (dict "about" $about "maxUnavailable" 1) */}}
{{- define "quire.disruptionBudget" -}}
maxUnavailable: {{ .maxUnavailable }}
# A pod that is not ready serves nobody. Its eviction need not wait for others, which may never become ready.
unhealthyPodEvictionPolicy: AlwaysAllow
selector:
  matchLabels:
    {{- include "quire.selectorLabels" .about | nindent 4 }}
{{- end -}}

{{/* Seconds in which a new pod that waits for a model is ready: the time to load it, and to prepare it. */}}
{{- define "quire.progressSeconds" -}}
{{- add (int .Values.worker.startupSeconds) 600 -}}
{{- end -}}

{{/* Image of a service of ours: (dict "root" $ "image" .Values.gateway.image) */}}
{{- define "quire.image" -}}
{{- $tag := default (default .root.Chart.AppVersion .root.Values.image.tag) .image.tag -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository }}
{{- with .image.digest }}@{{ . }}{{ else }}:{{ $tag }}{{ end }}
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
serviceAccountName: {{ include "quire.serviceAccountName" .root | quote }}
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

{{/* Scheme of the gateways' HTTP port. A value that was set to null is as good as empty. */}}
{{- define "quire.httpScheme" -}}
{{- ternary "http" "https" (empty .Values.gateway.tls.existingSecret) -}}
{{- end -}}

{{/* Variables of all three services. */}}
{{/* Not empty if services use mutual TLS. Fails where the values leave open whether they do. */}}
{{- define "quire.hasMutualTls" -}}
{{- $named := values .Values.mtls.secrets | compact -}}
{{- if and .Values.insecure $named -}}
{{- fail "insecure is true, and mtls.secrets are set: set insecure to false, with which services use mutual TLS" -}}
{{- else if and (not .Values.insecure) (ne (len $named) 3) -}}
{{- fail "insecure is false: set mtls.secrets.gateway, mtls.secrets.scheduler and mtls.secrets.worker, or insecure to true, with which services do not check who calls them" -}}
{{- end -}}
{{- if not .Values.insecure -}}true{{- end -}}
{{- end -}}

{{- define "quire.identityMounts" -}}
{{- if include "quire.hasMutualTls" . -}}
- {name: mtls, mountPath: /etc/quire/mtls, readOnly: true}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "worker") */}}
{{- define "quire.identityVolumes" -}}
{{- if include "quire.hasMutualTls" .root -}}
- name: mtls
  secret:
    secretName: {{ get .root.Values.mtls.secrets .role }}
    defaultMode: 0440
{{- end -}}
{{- end -}}

{{- define "quire.commonEnv" -}}
- name: QUIRE_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- if include "quire.hasMutualTls" . }}
- name: QUIRE_MTLS_CERT_FILE
  value: /etc/quire/mtls/tls.crt
- name: QUIRE_MTLS_KEY_FILE
  value: /etc/quire/mtls/tls.key
- name: QUIRE_MTLS_CA_FILE
  value: /etc/quire/mtls/ca.crt
{{- else }}
# Services do not check who calls them.
- name: QUIRE_INSECURE
  value: "1"
{{- end }}
{{- with .Values.otel.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Variables of `settings`; null leaves one out. Numbers stay as they were written. */}}
{{- define "quire.settingsEnv" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $name }}
  {{- /* Kubernetes would expand $(NAME). */}}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | replace "$(" "$$(" | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
Variables of a service as a list, with those of `extraEnv`, `extra`. Kubernetes takes the last one of a name in some ways of
installing, and refuses a name that is there twice in others.
*/}}
{{- define "quire.withExtraEnv" -}}
{{- $names := list -}}
{{- range fromYamlArray .env -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range .extra -}}
{{- if has .name $names -}}
{{- fail (printf "%s.extraEnv has %s, which another value of the chart sets, or which is there twice" $.service .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{ .env }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
What is served, as JSON: {"models": […]}. Each has the keys of values.yaml, `component` of its workers, and `workers`, `gpus`,
`resources` and `settings` of these.
*/}}
{{- define "quire.models" -}}
{{- $worker := .Values.worker -}}
{{- $models := list -}}
{{- if .Values.models -}}
{{- $alone := pick .Values.model "name" "revision" "tokenizer" "tokenizerRevision" "servedModelName" "chatTemplate" "chatTemplateKwargs" "chatRoles" "toolFormat" "reasoningFormat" "generationConfig" "overrideGenerationConfig" "task" -}}
{{- range $key, $value := $alone -}}
{{- if $value -}}
{{- fail (printf "model.%s cannot be set together with models: move it into an entry" $key) -}}
{{- end -}}
{{- end -}}
{{- $components := list -}}
{{- $names := list -}}
{{- range $model := .Values.models -}}
{{- $served := default (list (default "default" $model.name)) $model.servedModelName -}}
{{- $label := regexReplaceAll "[^a-z0-9]+" (first $served | lower) "-" | trimPrefix "-" | trunc 20 | trimSuffix "-" -}}
{{- $hash := first $served | sha256sum | trunc 8 -}}
{{- $component := printf "worker-%s" (default $hash $label) -}}
{{- /* The first entry keeps the label, so that workers which run already are not renamed where a model is added. */ -}}
{{- if has $component $components -}}
{{- $component = printf "worker-%s-%s" ($label | trunc 11 | trimSuffix "-") $hash -}}
{{- end -}}
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
{{- $settings := deepCopy (default dict $worker.settings) -}}
{{- range $key, $value := $model.settings -}}
{{- $_ := set $settings $key $value -}}
{{- end -}}
{{- $_ := set $entry "settings" $settings -}}
{{- $models = append $models $entry -}}
{{- end -}}
{{- else -}}
{{- $own := dict "component" "worker" "workers" $worker.replicas "gpus" $worker.gpus "resources" $worker.resources "settings" $worker.settings -}}
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
{{- with .task }}
- name: QUIRE_TASK
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The same for gateways that serve several models. */}}
{{- define "quire.modelsEnv" -}}
{{ include "quire.cacheEnv" . }}
- name: QUIRE_MODELS
  value: /etc/quire/models/models.toml
{{- end -}}

{{/* The TOML file of several models. JSON strings are valid TOML. */}}
{{- define "quire.modelsFile" -}}
{{- range (include "quire.models" . | fromJson).models }}
[[models]]
{{- range $key, $value := dict "model" .name "revision" .revision "tokenizer" .tokenizer "tokenizer_revision" .tokenizerRevision "served_model_name" .servedModelName "chat_template" .chatTemplate "chat_roles" .chatRoles "tool_format" .toolFormat "reasoning_format" .reasoningFormat "generation_config" .generationConfig "task" .task }}
{{- with $value }}
{{ $key }} = {{ . | toJson }}
{{- end }}
{{- end }}
{{- range $table, $values := dict "chat_template_kwargs" .chatTemplateKwargs "override_generation_config" .overrideGenerationConfig }}
{{- with $values }}
[models.{{ $table }}]
{{- range $key, $value := . }}
{{ $key | toJson }} = {{ $value | toJson }}
{{- end }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{/* Whether only the worker's image can prepare a model, by converting a file of it: "true" or nothing. */}}
{{- define "quire.isConverted" -}}
{{- if or (hasSuffix ".gguf" (default "" .name)) (hasSuffix ".gguf" (default "" .tokenizer)) -}}true{{- end -}}
{{- end -}}

{{/*
Prepares a model's files with the worker's image. On a shared volume one pod works and the others wait for it.
(dict "root" $ "model" $model)
*/}}
{{- define "quire.prepareContainer" -}}
- name: {{ .model.component | replace "worker" "prepare-model" }}
  image: {{ include "quire.image" (dict "root" .root "image" .root.Values.worker.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, worker_svc.prepare]
  env:
    {{- include "quire.modelEnv" .model | nindent 4 }}
    {{- with include "quire.prepareEnv" .root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- include "quire.prepareSettings" .root | nindent 2 }}
  resources:
    {{- toYaml .root.Values.worker.prepareResources | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    {{- include "quire.prepareMounts" .root | nindent 4 }}
{{- end -}}

{{/* What containers that prepare models have in common. */}}
{{- define "quire.prepareEnv" -}}
{{- if .Values.model.hubToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hubToken.existingSecret }}
      key: {{ .Values.model.hubToken.key }}
{{- end }}
{{- if .Values.prepare.caBundle.existingConfigMap }}
{{- /* httpx, huggingface_hub and its transfers read the first, pip the second. */}}
{{- range list "SSL_CERT_FILE" "PIP_CERT" }}
- name: {{ . }}
  value: /etc/quire/ca/{{ $.Values.prepare.caBundle.key }}
{{- end }}
{{- end }}
{{- with .Values.prepare.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quire.prepareSettings" -}}
{{- with .Values.prepare.envFrom -}}
envFrom:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- include "quire.containerSecurity" . }}
{{- end -}}

{{- define "quire.prepareMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.prepare.caBundle.existingConfigMap }}
- {name: ca-bundle, mountPath: /etc/quire/ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of pods that prepare models. */}}
{{- define "quire.prepareVolumes" -}}
{{ include "quire.modelVolume" . }}
{{- with .Values.prepare.caBundle.existingConfigMap }}
- name: ca-bundle
  configMap:
    name: {{ . }}
{{- end }}
- name: tmp
  emptyDir: {}
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
{{- default (include "quire.objectName" (dict "root" . "component" "redis")) .Values.redis.existingSecret -}}
{{- end -}}

{{/* Fails where the values of the Redis contradict each other. */}}
{{- define "quire.checkRedis" -}}
{{- with .Values.redis -}}
{{- if and .enabled (or .externalUrl .externalUrlSecret.name .tls.existingSecret) -}}
{{- fail "redis.enabled is true, and redis.externalUrl, redis.externalUrlSecret.name or redis.tls.existingSecret is set: set redis.enabled to false to use that Redis" -}}
{{- end -}}
{{- if and .externalUrl .tls.existingSecret (not .externalUrlSecret.name) (not (hasPrefix "rediss" .externalUrl)) -}}
{{- fail "redis.tls.existingSecret is set, and redis.externalUrl has no TLS: with it the URL begins with rediss" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.redisEnv" -}}
{{- include "quire.checkRedis" . -}}
{{- with .Values.redis.tls }}
{{- if .existingSecret }}
{{- $files := dict "QUIRE_REDIS_CA_FILE" .caKey "QUIRE_REDIS_CERT_FILE" .certKey "QUIRE_REDIS_KEY_FILE" .privateKeyKey }}
{{- range $name, $key := $files }}
{{- if $key }}
- name: {{ $name }}
  value: {{ printf "/etc/quire/redis-tls/%s" $key | quote }}
{{ end -}}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.redis.prefix }}
- name: QUIRE_REDIS_PREFIX
  value: {{ . | quote }}
{{ end -}}
{{- if .Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.redisSecret" . }}
      key: {{ .Values.redis.key }}
- name: QUIRE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "quire.objectName" (dict "root" . "component" "redis") }}:6379/0
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
{{- $name := include "quire.objectName" (dict "root" . "component" "scheduler") -}}
{{- $addresses := list -}}
{{- range until (int .Values.scheduler.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:50052" $name . $name) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}
