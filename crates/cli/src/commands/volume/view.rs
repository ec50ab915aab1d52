//! A volume in the form that `rio volume create` and `show` print.

use riopipe::{MemberInfo, VolumeInfo};
use riopipe_lab::{
    table::{Align, Table},
    terminal::Terminal,
    units,
};
use serde::Serialize;

use crate::output::Report;

/// The source of the description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The volume has just been created.
    Created,
    /// The volume existed.
    Found,
}

/// A volume. Its JSON is the library's description of it, its size in bytes and its state.
#[derive(Debug, Serialize)]
pub(super) struct VolumeView<'a> {
    schema: &'static str,
    #[serde(flatten)]
    info: &'a VolumeInfo,
    bytes: u64,
    state: &'static str,
    #[serde(skip)]
    origin: Origin,
}

impl<'a> VolumeView<'a> {
    pub(super) fn new(info: &'a VolumeInfo, origin: Origin) -> Self {
        Self {
            schema: "rio-volume/1",
            info,
            bytes: info.blocks * u64::from(info.block_size),
            state: state(&info.members),
            origin,
        }
    }
}

/// Whether the volume could be opened now.
fn state(members: &[MemberInfo]) -> &'static str {
    let any = |what: fn(&MemberInfo) -> bool| members.iter().any(what);
    if any(|member| member.owner.is_some()) {
        "owned"
    } else if any(|member| member.log_lost) {
        "log lost"
    } else if any(|member| member.unrecovered > 0) {
        "unrecovered"
    } else {
        "free"
    }
}

impl Report for VolumeView<'_> {
    fn text(&self, terminal: &Terminal) -> String {
        let info = self.info;
        let what = match self.origin {
            Origin::Created => format!("Volume {:?} is made", info.name),
            Origin::Found => format!("Volume {:?}", info.name),
        };
        let mut text = format!(
            "{what}: {}, engine {}, {} streams, stripe unit {}, generation {}\n\
             id {}, {}\n\n",
            units::bytes(self.bytes),
            info.engine,
            info.streams,
            units::bytes(u64::from(info.unit_blocks) * u64::from(info.block_size)),
            info.generation,
            info.id,
            meaning(self.state),
        );
        let mut table = Table::new(&[
            ("", Align::Right),
            ("member", Align::Left),
            ("size", Align::Right),
            ("cache", Align::Left),
            ("log", Align::Left),
            ("slots", Align::Right),
            ("state", Align::Left),
        ]);
        for (i, member) in info.members.iter().enumerate() {
            table.row([
                i.to_string(),
                member.addr.to_string(),
                units::bytes(member.blocks * u64::from(info.block_size)),
                if member.volatile { "volatile" } else { "safe" }.to_owned(),
                member.log.clone(),
                if member.slots > 0 { member.slots.to_string() } else { String::new() },
                member_state(member),
            ]);
        }
        text += &table.render(terminal);
        text
    }
}

fn meaning(state: &str) -> &'static str {
    match state {
        "owned" => "in use: opening it is refused while its owner is there, short of --take-over",
        "log lost" => {
            "a log was lost with its target's last boot: opening it is refused, short of \
             --accept-lost-log"
        }
        "unrecovered" => {
            "a log holds what has not been recovered: the next command that opens the volume recovers \
             it; `rio volume recover --dry-run` shows what that would do"
        }
        _ => "not in use",
    }
}

fn member_state(member: &MemberInfo) -> String {
    let mut states = Vec::new();
    if let Some(owner) = &member.owner {
        states.push(format!("owned by {owner}"));
    }
    if member.log_lost {
        states.push("log lost".to_owned());
    }
    if member.unrecovered > 0 {
        states.push(format!("{} entries not recovered", member.unrecovered));
    }
    states.join(", ")
}

#[cfg(test)]
mod tests {
    use riopipe::EngineKind;

    use super::*;

    fn info() -> VolumeInfo {
        let member = |addr: &str| MemberInfo {
            addr: addr.parse().unwrap(),
            nqn: "nqn.2026-11.com.example:d".to_owned(),
            nguid: "00".repeat(16),
            blocks: 1 << 18,
            volatile: true,
            log: "file".to_owned(),
            slots: 4000,
            owner: None,
            unrecovered: 0,
            log_lost: false,
        };
        VolumeInfo {
            name: "journal".to_owned(),
            id: riopipe::VolumeId([7; 16]),
            block_size: 4096,
            blocks: 1 << 19,
            unit_blocks: 16,
            streams: 8,
            generation: 3,
            engine: EngineKind::Rio,
            members: vec![member("192.0.2.1"), member("192.0.2.2:4421,ns=2")],
        }
    }

    /// The keys that scripts rely on.
    #[test]
    fn golden_json() {
        let info = info();
        let json = serde_json::to_value(VolumeView::new(&info, Origin::Found)).unwrap();
        let keys = |value: &serde_json::Value| {
            let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
            keys.sort();
            keys.join(" ")
        };
        assert_eq!(
            keys(&json),
            "block_size blocks bytes engine generation id members name schema state streams \
             unit_blocks"
        );
        assert_eq!(
            keys(&json["members"][0]),
            "addr blocks log log_lost nguid nqn owner slots unrecovered volatile"
        );
        assert_eq!(json["schema"], "rio-volume/1");
        assert_eq!(json["engine"], "rio");
        assert_eq!(json["bytes"], 2_147_483_648_u64);
        assert_eq!(json["state"], "free");
        assert_eq!(json["members"][1]["addr"], "192.0.2.2:4421,ns=2");
    }

    #[test]
    fn the_text_describes_the_volume_and_its_state() {
        let mut info = info();
        let text = |info: &VolumeInfo| VolumeView::new(info, Origin::Found).text(&Terminal::PLAIN);
        for part in ["\"journal\"", "2 GiB", "engine rio", "64 KiB", "192.0.2.2:4421", "not in use"]
        {
            assert!(text(&info).contains(part), "{part}: {}", text(&info));
        }
        info.members[1].unrecovered = 9;
        assert!(text(&info).contains("9 entries not recovered"));
        assert_eq!(state(&info.members), "unrecovered");
        info.members[0].owner = Some("nqn.2026-11.com.example:host".to_owned());
        assert!(text(&info).contains("owned by nqn.2026-11.com.example:host"));
        assert_eq!(state(&info.members), "owned");
    }
}
