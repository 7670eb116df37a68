{{- define "forktree.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{/* On every object; `component` tells them apart. */}}
{{- define "forktree.labels" -}}
app.kubernetes.io/name: forktree
app.kubernetes.io/part-of: forktree
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "forktree.selector" -}}
app.kubernetes.io/name: forktree
app.kubernetes.io/part-of: forktree
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* What a process may that needs nothing of its host. */}}
{{- define "forktree.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Which nodes run sessions. */}}
{{- define "forktree.nodeSelector" -}}
kubernetes.io/os: linux
kubernetes.io/arch: amd64
{{- with .Values.node.nodeSelector }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where a pod of a node may run, and how. */}}
{{- define "forktree.onNodes" -}}
priorityClassName: {{ .Values.priorityClass.name }}
nodeSelector:
  {{- include "forktree.nodeSelector" . | nindent 2 }}
{{- with .Values.node.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Names that clients use beside each agent's own: a list. */}}
{{- define "forktree.apiNames" -}}
{{- $names := .Values.agent.tls.names -}}
{{- if .Values.agent.service.enabled -}}
{{- $service := printf "forktree.%s" .Release.Namespace -}}
{{- $names = concat (list $service (printf "%s.svc" $service)) $names -}}
{{- end -}}
{{- $names | uniq | toYaml -}}
{{- end -}}

{{/* Folders of the nodes, beside the state directory, that hold namespaces' sockets: a list. */}}
{{- define "forktree.socketFolders" -}}
{{- $folders := list -}}
{{- range .Values.agent.serveNamespaces -}}
{{- $folders = append $folders (dir .) -}}
{{- end -}}
{{- without (sortAlpha $folders | uniq) (clean .Values.node.stateDirectory) | toYaml -}}
{{- end -}}
