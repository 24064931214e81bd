"""What users leave out: the rules, the decision they lead to, and its application."""
