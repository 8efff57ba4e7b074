"""Language models that write text, token by token: requests join and leave a batch at every decoding step."""
