# shellcheck shell=bash
# Sourced by run.sh and life.sh.

masked() { # hides what looks like the value of a secret, and users and passwords in addresses
  sed -E -e 's#//[^/@[:space:]]+@#//***@#g' \
    -e 's/([A-Za-z0-9_.-]*(key|token|secret|passw|credential)[A-Za-z0-9_]*"?(=|: ?|%3[dD]))[^[:space:]]+/\1***/gI'
}
