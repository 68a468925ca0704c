"""What the site has beside its pages: texts made of the code, and pages from outside of docs/."""
