//! `rio target ana`

use riopipe_lab::terminal::Terminal;
use riopipe_target::{ANA_GROUP_MAX, AnaState, PortState, Running};
use serde::{Deserialize, Serialize};

use crate::{
    args::target::Ana,
    control_socket::{Request, ask},
    failure::{Code, Failure},
    output::{Output, Report},
};

pub(super) fn run(args: &Ana, output: &Output) -> Result<(), Failure> {
    let set = args.port.zip(args.state.clone());
    let request = Request::Ana { set, group: args.group };
    let view: AnaView = ask(&args.control.control, &request, |_| {})?;
    output.result(&view)
}

/// Sets a state of a running target, if one is given. Returns all states.
pub(super) fn set(
    running: &Running,
    set: Option<&(u16, String)>,
    group: Option<u32>,
) -> Result<AnaView, Failure> {
    if let Some((port, state)) = set {
        let wrong = |message: String| Failure::new(Code::Usage, message);
        let Some(state) = AnaState::from_name(state) else {
            let names = AnaState::ALL.map(AnaState::name).join(", ");
            return Err(wrong(format!("{state:?} is no ANA state")).hint(format!("give {names}")));
        };
        running.set_ana(*port, group, state).map_err(|error| wrong(error.to_string()))?;
    }
    Ok(AnaView::of(&running.ana_states()))
}

/// The states that are not *optimized*.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AnaView {
    schema: String,
    states: Vec<StateView>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StateView {
    port: u16,
    /// `null` stands for all groups.
    group: Option<u32>,
    state: String,
}

impl AnaView {
    fn of(states: &[PortState]) -> Self {
        let view = |of: &PortState, group| StateView {
            port: of.port,
            group,
            state: of.state.name().into(),
        };
        let mut views = Vec::new();
        for of_port in states.chunk_by(|one, other| one.port == other.port) {
            let all_alike = of_port.len() == ANA_GROUP_MAX as usize
                && of_port.iter().all(|of| of.state == of_port[0].state);
            match all_alike {
                true => views.push(view(&of_port[0], None)),
                false => views.extend(of_port.iter().map(|of| view(of, Some(of.group)))),
            }
        }
        Self { schema: "rio-target-ana/1".into(), states: views }
    }
}

impl Report for AnaView {
    fn text(&self, _: &Terminal) -> String {
        if self.states.is_empty() {
            return "All ports are optimized.\n".into();
        }
        let line = |view: &StateView| match view.group {
            Some(group) => format!("port {}, ANA group {group}: {}\n", view.port, view.state),
            None => format!("port {}: {}\n", view.port, view.state),
        };
        self.states.iter().map(line).collect()
    }
}
