{{/* Pods that ask nothing of Kubernetes. */}}
{{- define "batchwright.account" -}}
serviceAccountName: {{ .Release.Name }}
automountServiceAccountToken: false
{{- end }}

{{/* What all pods have in common. */}}
{{- define "batchwright.pod" -}}
enableServiceLinks: false   # a Service named `batchwright` would set BATCHWRIGHT_PORT
terminationGracePeriodSeconds: 60   # more than BATCHWRIGHT_SHUTDOWN_GRACE_SECONDS: a job writes its checkpoint
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "batchwright.locked" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* The container that makes the passfile of an image. */}}
{{- define "batchwright.passfile" -}}
- name: passfile          # libpq takes a passfile that only its user may read; a Secret's file is the group's too
  image: {{ .image }}
  command: [install, --mode=0600, /secret/pgpass, /tmp/pgpass]
  securityContext: {{ include "batchwright.locked" . }}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  volumeMounts:
    - {name: database, mountPath: /secret, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "batchwright.volumes" -}}
- {name: database, secret: {secretName: {{ .Values.database.secret }}, defaultMode: 0440}}
- {name: runs, persistentVolumeClaim: {claimName: {{ .Release.Name }}-runs}}
- {name: data, emptyDir: {}}
- {name: tmp, emptyDir: {}}
{{- end }}

{{- define "batchwright.mounts" -}}
- {name: data, mountPath: /data}
- {name: runs, mountPath: /runs}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/* The port of the metrics, which only processes that have a pod of their own may take. */}}
{{- define "batchwright.metrics" -}}
- {name: BATCHWRIGHT_METRICS_HOST, value: "0.0.0.0"}
- {name: BATCHWRIGHT_METRICS_PORT, value: "9100"}
{{- end }}

{{/* The resources of a worker, with its GPUs. */}}
{{- define "batchwright.resources" -}}
{{ mergeOverwrite (deepCopy .resources) (ternary (dict "limits" (dict "nvidia.com/gpu" .gpus)) dict (gt (int .gpus) 0)) | toJson }}
{{- end }}

{{/* What every pod asks: the names of others, and PostgreSQL. */}}
{{- define "batchwright.egress" -}}
- to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}, podSelector: {matchLabels: {k8s-app: kube-dns}}}]
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
- to: [{ipBlock: {cidr: {{ .Values.database.cidr }}}}]   # PostgreSQL
  ports: [{port: {{ .Values.database.port }}}]
{{- end }}

{{/* The namespaces of a rule of the network policy, from the list of their names. */}}
{{- define "batchwright.namespaces" -}}
[{namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}]}}]
{{- end }}

{{/* What a container of a Ray node has: probes that need no program of the image, whatever KubeRay's version. */}}
{{- define "batchwright.ray" -}}
{{- range list "livenessProbe" "readinessProbe" }}
{{ . }}: {httpGet: {path: /api/healthz, port: 52365}, initialDelaySeconds: 30, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 12}
{{- end }}
securityContext: {{ include "batchwright.locked" . }}
{{- end }}
