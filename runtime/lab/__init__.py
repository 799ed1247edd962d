"""The lab: a cluster described by a file and built on one Linux machine, with real links, speeds and failures."""
