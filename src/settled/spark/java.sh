#!/bin/sh
# The packaged runtime lacks a module that Spark asks for and does not need.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "@JAVA@" "$@"
