//! Volumes against real targets, in this process, on real sockets.

mod crash;
mod drive_orders;
mod extend;
mod given_up;
mod incarnations;
mod late;
mod lease;
mod lost_log;
mod metrics;
mod opimq;
mod reads;
mod reconnect;
mod recovery;
mod redirect;
mod reopen;
mod site;
mod slow;
mod submitted_reads;
mod volume;
mod waiting;
mod wakers;
