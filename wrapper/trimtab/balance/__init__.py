"""What the measured numbers of a pipeline mean, and what to do about them. Pure functions: no I/O, no torch.

`plan` has the words; `detect` sees that stages are apart, `diagnosing` why; `measuring` gives costs and speeds, `model`
those of what has not run; `pipeline` says what a plan would take, `layouts` which layers go where, `deciding` what to
do about it.
"""
