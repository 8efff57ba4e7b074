{{- define "conch.name" -}}
{{- if contains "conch" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-conch" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "conch.selector" -}}
app.kubernetes.io/name: conch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "conch.labels" -}}
{{ include "conch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- /* Busy models may have the time for their end twice: those that are killed keep the others waiting. */ -}}
{{- define "conch.gracePeriod" -}}
{{- with .Values.stopping }}{{ add (int .waitSeconds) (int .requestsSeconds) (mul 2 (int .finalizeSeconds)) 5 }}{{ end }}
{{- end }}
