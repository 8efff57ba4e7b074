terraform {
  required_version = ">= 1.3"
  required_providers {
    oci = {
      source = "oracle/oci"
    }
  }
}

provider "oci" {
  region = var.region
}

resource "oci_datascience_model" "artifact" {
  count                        = var.model_id == null ? 1 : 0
  compartment_id               = var.compartment_id
  project_id                   = var.project_id
  display_name                 = @{display_name}
  model_artifact               = "${path.module}/../artifact.zip"
  artifact_content_length      = @{size}
  artifact_content_disposition = "attachment; filename=artifact.zip"

  # The deployment gets the new model before the old one is deleted.
  lifecycle {
    create_before_destroy = true
  }
}

resource "oci_datascience_model_deployment" "server" {
  compartment_id = var.compartment_id
  project_id     = var.project_id
  display_name   = @{display_name}

  model_deployment_configuration_details {
    deployment_type = "SINGLE_MODEL"

    model_configuration_details {
      model_id       = var.model_id == null ? oci_datascience_model.artifact[0].id : var.model_id
      bandwidth_mbps = var.bandwidth_mbps

      instance_configuration {
        instance_shape_name = var.instance_shape
        subnet_id           = var.subnet_id

        dynamic "model_deployment_instance_shape_config_details" {
          for_each = endswith(var.instance_shape, ".Flex") ? [1] : []
          content {
            ocpus         = var.ocpus
            memory_in_gbs = var.memory_in_gbs
          }
        }
      }

      scaling_policy {
        policy_type    = "FIXED_SIZE"
        instance_count = var.instance_count
      }
    }

    environment_configuration_details {
      environment_configuration_type = "OCIR_CONTAINER"
      image                          = var.image
      server_port                    = @{port}
      health_check_port              = @{port}
      # Arguments of the image's entry point.
      cmd = [
@{command}      ]
      environment_variables = {
@{variables}      }
    }
  }

  dynamic "category_log_details" {
    for_each = var.log_group_id == null ? [] : [1]
    content {
      dynamic "access" {
        for_each = var.access_log_id == null ? [] : [1]
        content {
          log_group_id = var.log_group_id
          log_id       = var.access_log_id
        }
      }
      dynamic "predict" {
        for_each = var.predict_log_id == null ? [] : [1]
        content {
          log_group_id = var.log_group_id
          log_id       = var.predict_log_id
        }
      }
    }
  }
}

output "url" {
  description = "Where the deployment answers; /predict follows it."
  value       = oci_datascience_model_deployment.server.model_deployment_url
}
