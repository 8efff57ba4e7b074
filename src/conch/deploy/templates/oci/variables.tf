variable "compartment_id" {
  description = "OCID of the compartment."
  type        = string
}

variable "project_id" {
  description = "OCID of the Data Science project."
  type        = string
}

variable "image" {
  description = "The image in the container registry, such as iad.ocir.io/NAMESPACE/conch:1."
  type        = string
}

variable "model_id" {
  description = "OCID of a model that is already in the model catalog; without one, ../artifact.zip is uploaded."
  type        = string
  default     = null
}

variable "region" {
  description = "Region, such as us-ashburn-1; that of ~/.oci/config by default."
  type        = string
  default     = null
}

variable "instance_shape" {
  description = "Shape of the instances, such as VM.GPU.A10.1."
  type        = string
  default     = "VM.Standard.E4.Flex"
}

variable "ocpus" {
  description = "OCPUs of an instance whose shape is flexible."
  type        = number
  default     = 4
}

variable "memory_in_gbs" {
  description = "Memory of an instance whose shape is flexible."
  type        = number
  default     = 32
}

variable "instance_count" {
  description = "Number of instances."
  type        = number
  default     = 1
}

variable "bandwidth_mbps" {
  description = "Bandwidth of the load balancer, in Mbit/s."
  type        = number
  default     = 10
}

variable "subnet_id" {
  description = "OCID of a subnet, needed where the server must reach the internet."
  type        = string
  default     = null
}

variable "log_group_id" {
  description = "OCID of a log group, to keep what the server and the load balancer log."
  type        = string
  default     = null
}

variable "access_log_id" {
  description = "OCID of the log for requests; needs log_group_id."
  type        = string
  default     = null
}

variable "predict_log_id" {
  description = "OCID of the log for what the server writes; needs log_group_id."
  type        = string
  default     = null
}
