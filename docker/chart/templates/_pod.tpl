{{/* What all pods have in common. */}}
{{- define "batchwright.pod" -}}
serviceAccountName: {{ .Release.Name }}
automountServiceAccountToken: false
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

{{/* The namespaces of a rule of the network policy, from the list of their names. */}}
{{- define "batchwright.namespaces" -}}
[{namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}]}}]
{{- end }}
