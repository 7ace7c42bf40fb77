-- Delayed messages count against a queue's maxSize.
create index scheduled_by_lane on scheduled (lane_id);
