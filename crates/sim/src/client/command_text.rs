//! Short texts of commands, for traces.

use riopipe_nvme::command::{Sqe, admin, opcode};
use riopipe_session::initiator::opening::Call;
use riopipe_session::wire;

/// The text of a command of an opening.
pub(super) fn call(call: &Call) -> String {
    match call {
        Call::Admin { sqe, send, .. } => admin_command(sqe, send),
        Call::Io { sqe, .. } => io(sqe),
    }
}

fn admin_command(sqe: &Sqe, send: &[u8]) -> String {
    match sqe.opcode() {
        wire::ADMIN_STATUS => "status".into(),
        wire::ADMIN_CLAIM => match wire::Claim::decode(send) {
            Some(claim) => format!("claim, generation {}", claim.generation),
            None => "claim".into(),
        },
        wire::ADMIN_RELEASE => "release".into(),
        wire::ADMIN_LIST => format!("list of stream {}", sqe.dword(11)),
        wire::ADMIN_SETTLE => match wire::list::Settle::decode(send) {
            Some(settle) => {
                let each = settle.streams.iter().map(|s| {
                    format!("stream {} at {}{}", s.stream, s.k, if s.keep { ", kept" } else { "" })
                });
                format!("settle {}", each.collect::<Vec<_>>().join("; "))
            }
            None => "settle".into(),
        },
        admin::KEEP_ALIVE => "keep alive".into(),
        other => format!("admin command {other:#x}"),
    }
}

fn io(sqe: &Sqe) -> String {
    match sqe.opcode() {
        opcode::WRITE_ZEROES => {
            let deallocate = if sqe.deac() { ", deallocating" } else { "" };
            format!("zero {}+{} of namespace {}{deallocate}", sqe.slba(), sqe.nlb(), sqe.nsid())
        }
        opcode::FLUSH => format!("flush namespace {}", sqe.nsid()),
        other => format!("I/O command {other:#x}"),
    }
}
