"""Every architecture of transformers, tiny and random, served by conch and compared with transformers itself."""
