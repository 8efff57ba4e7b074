"""What ``conch check`` looks at: a repository's files, read and compared; nothing is started and no model code runs."""
