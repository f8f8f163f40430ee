"""One file per finding. Each asks the subject one question and returns a finding of `audit.report`."""
