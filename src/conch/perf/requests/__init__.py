"""From samples to requests as they are sent.  Made once, before anything is measured; pure."""
