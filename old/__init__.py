"""The helpers of before: what the scripts that have not moved yet import from. Nothing new goes here."""
